//! Ranks that wait for each other at every micro-batch: cost and cap together.
//!
//! Micro-batches that run at the same time are a *round*, `dp_size` of them. A round takes as long as its heaviest
//! micro-batch, so the sum of those is what is kept small.

use std::cmp::Reverse;
use std::collections::BinaryHeap;
use std::collections::binary_heap::PeekMut;

use crate::bins::{Bins, filled, sorted};
use crate::cost::{Cost, total};
use crate::left::Left;

/// How much more than an even share of what is left a round may take: what is above that waits for the next one.
const SHARES: [f64; 12] = [1.0, 1.001, 1.002, 1.005, 1.01, 1.015, 1.02, 1.03, 1.05, 1.08, 1.15, 1.3];

/// How many samples are placed, over all shares that are tried: a bound in work. Where there are more samples than this,
/// what is dealt in order is as even.
const WORK: usize = 1 << 17;

/// Fills `rounds` rounds of `dp_size` micro-batches, none empty, and returns round after round.
///
/// Each round is filled up to a level: the cost of its longest sample, or its share where that is more. The lightest
/// micro-batch takes the longest sample that is left and that both the cap and the level have room for. Several shares
/// are tried and the best is kept. `None` where no share places every sample under the cap, and where there are fewer
/// samples than micro-batches or too many to try. A longer sample costs no less.
pub fn level_fill(
    lengths: &[i64],
    costs: &[Cost],
    capacity: i64,
    dp_size: usize,
    rounds: usize,
) -> Option<Bins> {
    let tries = (WORK / lengths.len().max(1)).min(SHARES.len());
    if tries == 0 {
        return None;
    }
    let sorted = sorted(lengths);
    let costs_in_order: Vec<Cost> = sorted.iter().map(|(_, sample)| costs[*sample]).collect();
    let fills = SHARES
        .iter()
        .step_by(SHARES.len().div_ceil(tries))
        .filter_map(|share| Filling::new(&sorted, &costs_in_order).fill(capacity, dp_size, rounds, *share));
    let (_, bin_of) = fills.min_by_key(|(waited, _)| *waited)?;
    let mut sizes = vec![0; rounds * dp_size];
    for bin in &bin_of {
        sizes[*bin as usize] += 1;
    }
    Some(filled(&sizes, sorted.into_iter().map(|(_, sample)| sample).zip(bin_of)))
}

/// Samples that are not placed yet, and what they cost.
struct Filling<'a> {
    left: Left<'a>,
    costs: &'a [Cost],
    cost: Cost,
}

impl<'a> Filling<'a> {
    fn new(sorted: &'a [(i64, usize)], costs: &'a [Cost]) -> Self {
        Self { left: Left::new(sorted), costs, cost: total(costs.iter().copied()) }
    }

    /// The longest that is within `room` and costs at most `spare`.
    fn fitting(&mut self, room: i64, spare: Cost) -> Option<usize> {
        // Of a model that costs less for more this finds something else, but nothing over the cap.
        let within = self.left.place_within(room);
        let cheap = self.costs[within..].partition_point(|cost| *cost > spare);
        self.left.longest(within + cheap)
    }

    fn take(&mut self, place: usize) -> (i64, Cost) {
        self.left.take(place);
        self.cost -= self.costs[place].min(self.cost);
        (self.left.sorted[place].0, self.costs[place])
    }

    /// What all rounds take together, and the micro-batch of each sample.
    fn fill(&mut self, capacity: i64, dp_size: usize, rounds: usize, share: f64) -> Option<(Cost, Vec<u32>)> {
        let mut waited: Cost = 0;
        let mut bin_of = vec![0; self.left.sorted.len()];
        let mut room = vec![0; dp_size];
        for round in 0..rounds {
            let slots_later = (rounds - round - 1) * dp_size;
            let even = self.cost as f64 / (slots_later + dp_size) as f64;
            let level = match slots_later {
                0 => Cost::MAX,
                _ => self.costs[self.left.longest(0)?].max((share * even) as Cost),
            };
            // One each, so that none is empty; also what is over the cap.
            let mut lightest = BinaryHeap::with_capacity(dp_size);
            for (bin, room) in room.iter_mut().enumerate() {
                let place = self.left.longest(0)?;
                let (length, cost) = self.take(place);
                bin_of[place] = (round * dp_size + bin) as u32;
                *room = capacity - length;
                lightest.push(Reverse((cost, bin)));
            }
            let mut heaviest = lightest.iter().map(|Reverse((load, _))| *load).max()?;
            // One is kept in hand for each micro-batch to come.
            while self.left.count > slots_later
                && let Some(mut top) = lightest.peek_mut()
            {
                let Reverse((load, bin)) = *top;
                let Some(place) = self.fitting(room[bin], level.saturating_sub(load)) else {
                    PeekMut::pop(top);
                    continue;
                };
                let (length, cost) = self.take(place);
                bin_of[place] = (round * dp_size + bin) as u32;
                room[bin] -= length;
                let load = load.saturating_add(cost);
                heaviest = heaviest.max(load);
                *top = Reverse((load, bin));
            }
            waited = waited.saturating_add(heaviest);
        }
        (self.left.count == 0).then_some((waited, bin_of))
    }
}

/// Deals each round's micro-batches to ranks so that ranks' totals are even too. Heavy rounds come first.
pub fn deal_rounds(mut bins: Vec<Vec<usize>>, costs: &[Cost], dp_size: usize) -> Vec<Vec<usize>> {
    let loads: Vec<Cost> = bins.iter().map(|bin| total(bin.iter().map(|s| costs[*s]))).collect();
    let mut rounds: Vec<usize> = (0..bins.len()).step_by(dp_size).collect();
    rounds.sort_by_key(|first| Reverse(loads[*first..*first + dp_size].iter().max().copied()));
    let mut done = vec![0; dp_size];
    let mut ranks = vec![Vec::with_capacity(rounds.len()); dp_size];
    for first in rounds {
        let mut heaviest: Vec<usize> = (first..first + dp_size).collect();
        heaviest.sort_by_key(|bin| Reverse(loads[*bin]));
        let mut idle: Vec<usize> = (0..dp_size).collect();
        idle.sort_by_key(|rank| done[*rank]);
        for (rank, bin) in idle.into_iter().zip(heaviest) {
            done[rank] = loads[bin].saturating_add(done[rank]);
            ranks[rank].push(std::mem::take(&mut bins[bin]));
        }
    }
    ranks.into_iter().flatten().collect()
}
