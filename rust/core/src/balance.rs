//! Balance: the same number of micro-batches on every rank, none empty, and nobody waiting longer than needed.

use std::cmp::Reverse;
use std::collections::BinaryHeap;
use std::collections::binary_heap::PeekMut;
use std::iter::once_with;

use crate::Result;
use crate::bins::{Bins, few_bins, filled, sorted};
use crate::cost::{Cost, total};
use crate::error::{counted, plan_error};
use crate::lockstep::{deal_rounds, level_fill};
use crate::partition::{cost_of, heaviest_first, lpt};
use crate::swaps::even_out;

/// When ranks wait for each other.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Sync {
    /// Once a step (DDP, pipelines): ranks' totals are evened out.
    Step,
    /// At every micro-batch (FSDP, expert parallelism): what runs at the same time is evened out.
    MicroBatch,
}

impl Sync {
    pub fn parse(name: &str) -> Result<Self> {
        match name {
            "step" => Ok(Self::Step),
            "micro_batch" => Ok(Self::MicroBatch),
            _ => plan_error!("sync is '{name}'; it has to be step or micro_batch"),
        }
    }
}

/// What limits a micro-batch.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Limit {
    /// Padded tokens of its sequences. A longer sample is alone in its micro-batch.
    Tokens(i64),
    Samples(usize),
}

/// The shape that a step's schedule has to have.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Shape {
    pub dp_size: usize,
    pub limit: Limit,
    /// Every rank's number of micro-batches is a multiple of this.
    pub multiple: usize,
    /// Whether micro-batches may be empty where there are fewer samples than micro-batches.
    pub placeholders: bool,
    pub sync: Sync,
}

/// A heaviest rank that is above the mean by less than one in so many is even enough.
const EVEN: Cost = 5_000;

/// More micro-batches in a step than this are a mistake in the arguments.
const MAX_SLOTS: usize = 1 << 26;

/// The micro-batches of one step: all of rank 0's, then rank 1's and so on, each a list of samples in input order.
/// `lengths` are padded; `step` is for the error.
pub fn schedule(step: usize, lengths: &[i64], costs: &[Cost], shape: &Shape) -> Result<Bins> {
    let bins = bins(lengths, shape);
    let per_rank = per_rank(step, bins.len(), shape)?;
    let slots = per_rank * shape.dp_size;
    let missing = slots.saturating_sub(lengths.len());
    if missing > 0 && !shape.placeholders {
        return plan_error!(
            "step {step} has {}, and dp_size {} x {per_rank} micro-batches on each rank need at least {slots}: {missing} \
             missing. Lower dp_size or micro_batch_multiple, take larger steps, or pass placeholders=True",
            counted(lengths.len(), "sample"),
            shape.dp_size
        );
    }
    Ok(place(bins, lengths, costs, shape, per_rank))
}

/// As few micro-batches as the limit allows; where it is one of samples, only their number says something.
pub(crate) fn bins(lengths: &[i64], shape: &Shape) -> Bins {
    match shape.limit {
        Limit::Tokens(capacity) => by_budget(lengths, capacity, shape),
        Limit::Samples(size) => {
            let mut bins = Bins::default();
            bins.pad(lengths.len().div_ceil(size));
            bins
        }
    }
}

/// Few bins under the cap; what is over it is alone.
fn by_budget(lengths: &[i64], capacity: i64, shape: &Shape) -> Bins {
    // Only what saves each rank a micro-batch is worth a search.
    let few = |lengths: &[i64], alone: usize| {
        let needed = total(lengths.iter().map(|length| Cost::from(length.unsigned_abs())))
            .div_ceil(Cost::from(capacity.max(1).unsigned_abs()));
        let k = |num_bins: usize| shape.per_rank(num_bins.saturating_add(alone));
        let least = usize::try_from(needed).map_or(usize::MAX, k);
        few_bins(lengths, capacity, |found| k(found) <= least)
    };
    if lengths.iter().all(|length| *length <= capacity) {
        return few(lengths, 0);
    }
    let (fitting, alone): (Vec<_>, Vec<_>) = (0..lengths.len()).partition(|i| lengths[*i] <= capacity);
    let short: Vec<i64> = fitting.iter().map(|i| lengths[*i]).collect();
    let mut bins: Bins = few(&short, alone.len()).iter().map(|bin| bin.iter().map(|i| fitting[*i])).collect();
    for sample in alone {
        bins.push([sample]);
    }
    bins
}

/// K, where so many bins are to be dealt to ranks.
pub(crate) fn per_rank(step: usize, num_bins: usize, shape: &Shape) -> Result<usize> {
    let per_rank = shape.per_rank(num_bins);
    match per_rank.saturating_mul(shape.dp_size) {
        slots if slots > MAX_SLOTS => plan_error!(
            "step {step} would have {slots} micro-batches, and {MAX_SLOTS} is the most; lower dp_size or \
             micro_batch_multiple"
        ),
        _ => Ok(per_rank),
    }
}

impl Shape {
    pub(crate) fn per_rank(&self, num_bins: usize) -> usize {
        num_bins.div_ceil(self.dp_size).next_multiple_of(self.multiple)
    }
}

/// Places samples in `per_rank` micro-batches on each rank, none empty where there are enough samples.
pub(crate) fn place(bins: Bins, lengths: &[i64], costs: &[Cost], shape: &Shape, per_rank: usize) -> Bins {
    let filled = lengths.len().min(per_rank * shape.dp_size);
    let mut schedule = match shape.limit {
        Limit::Tokens(capacity) => {
            let step = Step { lengths, costs, capacity, dp_size: shape.dp_size, per_rank };
            match shape.sync {
                Sync::MicroBatch if shape.dp_size > 1 => step.in_rounds(bins, filled),
                _ => step.by_rank(bins, filled),
            }
        }
        Limit::Samples(_) => by_count(lengths, costs, shape, per_rank).into_iter().collect(),
    };
    schedule.sort_each();
    schedule
}

/// Samples that are to be placed under a cap, in `dp_size` times `per_rank` micro-batches.
struct Step<'a> {
    lengths: &'a [i64],
    costs: &'a [Cost],
    capacity: i64,
    dp_size: usize,
    per_rank: usize,
}

impl Step<'_> {
    /// Ranks wait for each other at every micro-batch. `bins` are what is used where nothing better is found; `filled` is
    /// how many micro-batches are not empty.
    fn in_rounds(&self, bins: Bins, filled: usize) -> Bins {
        let Self { lengths, costs, capacity, dp_size, per_rank } = *self;
        let rounds = level_fill(lengths, costs, capacity, dp_size, per_rank).unwrap_or_else(|| {
            let bins = spread(lengths, costs, capacity, filled).unwrap_or_else(|| split(bins, costs, filled));
            self.heaviest_first(&bins).0
        });
        let mut rounds = rounds.lists();
        for round in rounds.chunks_mut(dp_size) {
            even_out(round, 1, lengths, costs, capacity);
        }
        deal_rounds(rounds, costs, dp_size).into_iter().collect()
    }

    /// Ranks wait for each other once: the first of three ways that is even, or the most even. Cheap ways come first.
    fn by_rank(&self, bins: Bins, filled: usize) -> Bins {
        let Self { lengths, costs, capacity, dp_size, per_rank } = *self;
        if dp_size == 1 {
            return self.heaviest_first(&split(bins, costs, filled)).0;
        }
        let ways = once_with(|| spread(lengths, costs, capacity, filled).map(|bins| self.deal(&bins)))
            .chain(once_with(|| Some(self.deal(&split(bins, costs, filled)))))
            .chain(once_with(|| {
                let rounds = level_fill(lengths, costs, capacity, dp_size, per_rank)?;
                Some(deal_rounds(rounds.lists(), costs, dp_size))
            }));
        let even = total(costs.iter().copied()) / dp_size as Cost;
        let mut best: Option<(Cost, Vec<Vec<usize>>)> = None;
        for mut schedule in ways.flatten() {
            even_out(&mut schedule, per_rank, lengths, costs, capacity);
            let ranks =
                schedule.chunks(per_rank).map(|rank| total(rank.iter().map(|bin| cost_of(bin, costs))));
            let heaviest = ranks.max().unwrap_or(0);
            if best.as_ref().is_none_or(|(least, _)| heaviest < *least) {
                best = Some((heaviest, schedule));
            }
            if best.as_ref().is_some_and(|(least, _)| *least <= even + even / EVEN) {
                break;
            }
        }
        let mut schedule = best.map(|(_, schedule)| schedule).unwrap_or_default();
        // What runs at the same time is alike then, which costs nothing and helps who waits a little all the same.
        for rank in schedule.chunks_mut(per_rank) {
            rank.sort_by_cached_key(|bin| Reverse(cost_of(bin, costs)));
        }
        schedule.into_iter().collect()
    }

    /// Deals bins to ranks, `per_rank` to each; where there are fewer, the rest stays empty.
    fn deal(&self, bins: &Bins) -> Vec<Vec<usize>> {
        let (bins, loads) = self.heaviest_first(bins);
        // LPT hands out the heaviest first, so each rank's micro-batches run from heavy to light.
        let ranks = lpt(&loads, &vec![self.per_rank; self.dp_size], 0);
        ranks.into_iter().flatten().map(|bin| bins.get(bin).to_vec()).collect()
    }

    /// As many bins as there are micro-batches, and what each costs.
    fn heaviest_first(&self, bins: &Bins) -> (Bins, Vec<Cost>) {
        let mut order: Vec<_> = bins.iter().map(|bin| (cost_of(bin, self.costs), bin)).collect();
        order.sort_by_key(|(cost, _)| Reverse(*cost));
        let mut ordered: Bins = order.iter().map(|(_, bin)| bin.iter().copied()).collect();
        let mut loads: Vec<_> = order.into_iter().map(|(cost, _)| cost).collect();
        ordered.pad(self.dp_size * self.per_rank);
        loads.resize(ordered.len(), 0);
        (ordered, loads)
    }
}

/// Exactly `slots` bins, none empty: longest first into the lightest bin that has room. `None` where a sample finds none.
/// There are at least `slots` samples.
fn spread(lengths: &[i64], costs: &[Cost], capacity: i64, slots: usize) -> Option<Bins> {
    /// How many bins are tried for one sample: a bound in work.
    const TRIES: usize = 16;
    // A load and its bin in one number, which is half as large as a pair and compared in one go. A total that leaves no
    // bits for the bin is of no real model: then nothing is spread.
    let bits = slots.next_power_of_two().trailing_zeros();
    total(costs.iter().copied()).checked_mul(1 << bits).filter(|key| *key < Cost::MAX)?;
    let mut lightest: BinaryHeap<_> = (0..slots as Cost).map(Reverse).collect();
    let mut passed_by = Vec::new();
    let mut room = vec![capacity; slots];
    let mut sizes = vec![0; slots];
    let sorted = sorted(lengths);
    // Beforehand and all at once: one by one, each look-up would be waited for.
    let costs: Vec<Cost> = sorted.iter().map(|(_, sample)| costs[*sample]).collect();
    let mut bin_of = Vec::with_capacity(sorted.len());
    for ((length, _), cost) in sorted.iter().zip(costs) {
        loop {
            let mut top = lightest.peek_mut()?;
            let bin = top.0 as usize & ((1 << bits) - 1);
            // What is over the cap takes an empty bin and leaves no room in it.
            if *length <= room[bin] || sizes[bin] == 0 {
                room[bin] -= length;
                sizes[bin] += 1;
                bin_of.push(bin as u32);
                // In its place: half the work of taking it out and putting it back.
                top.0 += cost << bits;
                break;
            }
            passed_by.push(PeekMut::pop(top));
            if passed_by.len() == TRIES {
                return None;
            }
        }
        lightest.extend(passed_by.drain(..));
    }
    Some(filled(&sizes, sorted.into_iter().map(|(_, sample)| sample).zip(bin_of)))
}

/// Splits the heaviest bins of several samples in two until there are `slots`.
fn split(bins: Bins, costs: &[Cost], slots: usize) -> Bins {
    if bins.len() >= slots {
        return bins;
    }
    let (mut whole, mut bins): (Vec<_>, Vec<_>) = bins.lists().into_iter().partition(|bin| bin.len() == 1);
    let mut heaviest: BinaryHeap<_> =
        bins.iter().enumerate().map(|(i, bin)| (cost_of(bin, costs), Reverse(i))).collect();
    while whole.len() + heaviest.len() < slots {
        let Some((_, Reverse(i))) = heaviest.pop() else { break };
        let members = std::mem::take(&mut bins[i]);
        let member_costs: Vec<_> = members.iter().map(|s| costs[*s]).collect();
        for half in lpt(&member_costs, &[members.len() - 1; 2], 0) {
            let half: Vec<usize> = half.into_iter().map(|i| members[i]).collect();
            if half.len() == 1 {
                whole.push(half);
            } else {
                heaviest.push((cost_of(&half, costs), Reverse(bins.len())));
                bins.push(half);
            }
        }
    }
    whole.extend(heaviest.into_iter().map(|(_, Reverse(i))| std::mem::take(&mut bins[i])));
    whole.sort_by_key(|bin| bin.first().copied()); // a heap's own order says nothing
    whole.into_iter().collect()
}

/// Equal counts: micro-batches and ranks hold the same number of samples, within one.
fn by_count(lengths: &[i64], costs: &[Cost], shape: &Shape, per_rank: usize) -> Vec<Vec<usize>> {
    let dp_size = shape.dp_size;
    let slots = dp_size * per_rank;
    let pick = |members: &[usize], limits: &[usize]| -> Vec<Vec<usize>> {
        let member_costs: Vec<_> = members.iter().map(|s| costs[*s]).collect();
        let extra = members.len().saturating_sub(limits.iter().sum());
        let parts = lpt(&member_costs, limits, extra).into_iter();
        parts.map(|part| part.into_iter().map(|i| members[i]).collect()).collect()
    };
    let order = heaviest_first(costs);
    match shape.sync {
        Sync::Step => {
            let ranks = pick(&order, &vec![order.len() / dp_size; dp_size]);
            let mut schedule: Vec<_> = ranks
                .iter()
                .flat_map(|members| pick(members, &vec![members.len() / per_rank; per_rank]))
                .collect();
            even_out(&mut schedule, per_rank, lengths, costs, i64::MAX);
            schedule
        }
        Sync::MicroBatch => {
            // Neighbours in cost run at the same time. The counts are dealt out first, so that ranks' counts are even.
            let (base, extra) = (order.len() / slots, order.len() % slots);
            let mut schedule = vec![Vec::new(); slots];
            let mut rest = order.as_slice();
            for k in 0..per_rank {
                let limits: Vec<_> =
                    (0..dp_size).map(|rank| base + usize::from(k * dp_size + rank < extra)).collect();
                let (now, later) = rest.split_at(limits.iter().sum());
                rest = later;
                let mut round = pick(now, &limits);
                even_out(&mut round, 1, lengths, costs, i64::MAX);
                for (rank, part) in round.into_iter().enumerate() {
                    schedule[rank * per_rank + k] = part;
                }
            }
            schedule
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_most_micro_batches_of_a_step_are_allowed_and_one_more_is_not() {
        let shape =
            Shape { dp_size: 1, limit: Limit::Samples(1), multiple: 1, placeholders: true, sync: Sync::Step };
        assert_eq!(per_rank(0, MAX_SLOTS, &shape), Ok(MAX_SLOTS));
        assert!(per_rank(0, MAX_SLOTS + 1, &shape).is_err());
    }
}
