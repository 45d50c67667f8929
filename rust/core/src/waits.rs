//! What a schedule leaves unused: room in micro-batches, and time in which ranks wait.

use crate::Result;
use crate::balance::{Limit, Shape, Sync};
use crate::cost::{Cost, total};
use crate::options::Options;
use crate::plan::positions_fit;

/// The values in consecutive parts of these sizes.
pub(crate) fn parts<'a>(
    sizes: impl Iterator<Item = usize> + 'a,
    mut values: &'a [i64],
) -> impl Iterator<Item = &'a [i64]> + 'a {
    sizes.map(move |size| {
        let (part, rest) = values.split_at(size);
        values = rest;
        part
    })
}

/// What the schedule leaves unused, over all steps.
#[derive(Debug, Default)]
pub(crate) struct Waits {
    tokens: i64,
    room: i64,
    slowest: Cost,
    all: Cost,
    ranks: usize,
}

impl Waits {
    /// `sizes`: of the micro-batches, whose samples have these lengths one after the other.
    pub fn add(
        &mut self,
        sizes: impl Iterator<Item = usize>,
        total_lengths: &[i64],
        options: &Options,
        shape: &Shape,
    ) -> Result<()> {
        let of = |micro_batch: &[i64]| {
            let lengths = micro_batch.iter().map(|length| options.cut.padded(*length));
            lengths.fold((0i64, 0), |(tokens, cost): (_, Cost), length| {
                (tokens.saturating_add(length), cost.saturating_add(options.cost.cost(length)))
            })
        };
        let (padded, loads): (Vec<i64>, Vec<Cost>) = parts(sizes, total_lengths)
            .map(of)
            .map(|(tokens, cost)| (options.cut.padded_total(tokens), cost))
            .unzip();
        let longest = padded.iter().copied().max().unwrap_or(0);
        positions_fit(longest)?;
        let budget = match shape.limit {
            Limit::Tokens(capacity) => capacity,
            Limit::Samples(_) => longest,
        };
        self.tokens += total_lengths.iter().sum::<i64>();
        self.room += padded.iter().map(|p| budget.max(*p)).sum::<i64>();
        let per_rank = loads.len() / shape.dp_size;
        let slowest = match shape.sync {
            Sync::Step => loads.chunks(per_rank).map(|rank| total(rank.iter().copied())).max().unwrap_or(0),
            Sync::MicroBatch => {
                total((0..per_rank).map(|k| loads[k..].iter().step_by(per_rank).copied().max().unwrap_or(0)))
            }
        };
        self.slowest = self.slowest.saturating_add(slowest);
        self.all = self.all.saturating_add(total(loads));
        self.ranks = shape.dp_size;
        Ok(())
    }

    pub fn fill(&self) -> f64 {
        self.tokens as f64 / self.room as f64
    }

    pub fn imbalance(&self) -> f64 {
        self.slowest as f64 * self.ranks as f64 / self.all as f64
    }
}
