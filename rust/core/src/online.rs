//! Micro-batches of a step that is still arriving.

use std::cmp::Reverse;

use crate::Result;
use crate::balance::{Limit, Shape, schedule};
use crate::bins::{Search, sorted};
use crate::cost::{Cost, total};
use crate::cut::{Cut, MAX_TOKENS};
use crate::error::plan_error;
use crate::left::Left;
use crate::options::{Options, over_budget, shape};
use crate::partition::lpt;
use crate::plan::positions_fit;

/// What the ranks run next: rank by rank its micro-batches, each a list of samples in the order in which they came.
pub type Round = Vec<Vec<Vec<usize>>>;

/// A sample that waits. They are numbered as they come, from 0 in each step.
#[derive(Debug, Clone, Copy)]
struct Waiting {
    sample: usize,
    padded: i64,
    /// What it takes of a micro-batch: padded tokens, or 1 where samples are counted.
    size: i64,
    cost: Cost,
}

/// Samples of one step that wait until they can go out in full micro-batches.
#[derive(Debug)]
pub struct Online {
    options: Options,
    shape: Shape,
    /// What a micro-batch holds.
    capacity: i64,
    /// A round goes out when what waits would fill this.
    enough: i64,
    /// In the order in which they came.
    waiting: Vec<Waiting>,
    num_samples: usize,
    /// What each rank was given in this step.
    loads: Vec<Cost>,
}

/// How many samples are tried at each place of a combination, and how many combinations for a micro-batch.
const BREADTH: usize = 8;
const TRIES: usize = 500;

impl Online {
    /// A round is `micro_batch_multiple` micro-batches on each rank. One goes out where `look_ahead` more would be full.
    pub fn new(options: Options, look_ahead: i64) -> Result<Self> {
        let shape = shape(&options)?;
        if !(1..=MAX_TOKENS).contains(&look_ahead) {
            return plan_error!("look_ahead is {look_ahead}; it has to be from 1 to {MAX_TOKENS}");
        }
        let capacity = match shape.limit {
            Limit::Tokens(capacity) => capacity.max(1),
            Limit::Samples(n) => n as i64,
        };
        let round = (shape.dp_size as i64).saturating_mul(shape.multiple as i64).saturating_mul(capacity);
        Ok(Self {
            options,
            shape,
            capacity,
            enough: round.saturating_mul(look_ahead + 1),
            waiting: Vec::new(),
            num_samples: 0,
            loads: vec![0; shape.dp_size],
        })
    }

    /// Takes in samples of these rows and lengths, and gives the rounds that can go out.
    pub fn add(&mut self, rows: &[i64], total_lengths: &[i64]) -> Result<Vec<Round>> {
        let mut rounds = Vec::new();
        let mut room = self.rooms();
        for (row, length) in rows.iter().zip(total_lengths) {
            let padded = self.options.cut.padded(*length);
            let size = match self.shape.limit {
                Limit::Tokens(capacity) if padded > capacity && !self.options.oversize_alone => {
                    return Err(over_budget(&format!("row {row}"), *length, padded, &self.options));
                }
                Limit::Tokens(_) => padded,
                Limit::Samples(_) => 1,
            };
            let came =
                Waiting { sample: self.num_samples, padded, size, cost: self.options.cost.cost(padded) };
            self.num_samples += 1;
            self.waiting.push(came);
            room = room.saturating_add(self.room(&came));
            // No micro-batch stays empty, for none takes up more room than it has.
            if room >= self.enough {
                rounds.push(self.full_round()?);
                room = self.rooms();
            }
        }
        Ok(rounds)
    }

    /// The step has arrived as a whole: what still waits, scheduled as a plan would, and the next step may begin.
    pub fn finish(&mut self, step: usize) -> Result<Round> {
        let waiting = std::mem::take(&mut self.waiting);
        let loads = std::mem::replace(&mut self.loads, vec![0; self.shape.dp_size]);
        self.num_samples = 0;
        let sizes: Vec<i64> = waiting.iter().map(|w| w.size).collect();
        let costs: Vec<Cost> = waiting.iter().map(|w| w.cost).collect();
        let micro_batches = schedule(step, &sizes, &costs, &self.shape)?.lists();
        let per_rank = micro_batches.len() / self.shape.dp_size;
        let ranks = micro_batches.chunks(per_rank).map(<[_]>::to_vec).collect();
        Ok(deal(ranks, &waiting, &loads, &self.options.cut)?.1)
    }

    /// The room of all that wait.
    fn rooms(&self) -> i64 {
        self.waiting.iter().map(|w| self.room(w)).fold(0, i64::saturating_add)
    }

    fn room(&self, waiting: &Waiting) -> i64 {
        waiting.size.min(self.capacity)
    }

    /// Full micro-batches: the oldest sample in each, so that none waits for ever, and beside it what leaves the least room.
    fn full_round(&mut self) -> Result<Round> {
        let sizes: Vec<i64> = self.waiting.iter().map(|w| w.size).collect();
        let sorted = sorted(&sizes);
        let mut place_of = vec![0; sorted.len()];
        for (place, (_, index)) in sorted.iter().enumerate() {
            place_of[*index] = place;
        }
        let mut left = Left::new(&sorted);
        let mut search = Search::new(BREADTH, TRIES);
        let mut oldest = place_of.iter();
        let mut micro_batches: Vec<Vec<usize>> = Vec::new();
        while micro_batches.len() < self.shape.dp_size * self.shape.multiple {
            let Some(first) = oldest.find(|place| left.longest(**place) == Some(**place)) else { break };
            let members = search.fill(&mut left, *first, self.capacity);
            micro_batches.push(members.map(|place| sorted[place].1).collect());
        }
        let costs: Vec<Cost> =
            micro_batches.iter().map(|m| total(m.iter().map(|i| self.waiting[*i].cost))).collect();
        let parts = lpt(&costs, &vec![self.shape.multiple; self.shape.dp_size], 0);
        let parts =
            parts.into_iter().map(|p| p.into_iter().map(|m| std::mem::take(&mut micro_batches[m])).collect());
        let (loads, round) = deal(parts.collect(), &self.waiting, &self.loads, &self.options.cut)?;
        self.loads = loads;
        let mut index = 0;
        self.waiting.retain(|_| {
            index += 1;
            left.longest(place_of[index - 1]) == Some(place_of[index - 1])
        });
        Ok(round)
    }
}

/// Deals parts (micro-batches of places among those that wait) to ranks, the heaviest to the one that was given least, so
/// that ranks stay even over the step. Gives what each rank has then, and the samples.
fn deal(
    parts: Vec<Vec<Vec<usize>>>,
    waiting: &[Waiting],
    loads: &[Cost],
    cut: &Cut,
) -> Result<(Vec<Cost>, Round)> {
    let cost = |part: &Vec<Vec<usize>>| total(part.iter().flatten().map(|i| waiting[*i].cost));
    let mut parts: Vec<_> = parts.into_iter().map(|part| (cost(&part), part)).collect();
    parts.sort_by_key(|(cost, _)| Reverse(*cost));
    let mut ranks: Vec<usize> = (0..loads.len()).collect();
    ranks.sort_by_key(|rank| loads[*rank]);
    let (mut loads, mut round) = (loads.to_vec(), vec![Vec::new(); loads.len()]);
    for ((cost, part), rank) in parts.into_iter().zip(ranks) {
        loads[rank] = loads[rank].saturating_add(cost);
        for micro_batch in part {
            let padded = micro_batch.iter().map(|i| waiting[*i].padded).fold(0, i64::saturating_add);
            positions_fit(cut.padded_total(padded))?;
            let mut samples: Vec<usize> = micro_batch.into_iter().map(|i| waiting[i].sample).collect();
            samples.sort_unstable();
            round[rank].push(samples);
        }
    }
    Ok((loads, round))
}
