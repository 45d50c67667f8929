//! Whole rollouts or prompt groups on one rank.

use crate::Result;
use crate::balance::{Shape, bins, per_rank, place};
use crate::bins::Bins;
use crate::cost::{Cost, total};
use crate::error::{counted, plan_error};
use crate::partition::partition;

/// What has to be on one rank as a whole in a step.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Keep {
    Rollouts,
    Groups,
}

impl Keep {
    pub fn parse(name: &str) -> Result<Self> {
        match name {
            "rollout" => Ok(Self::Rollouts),
            "group" => Ok(Self::Groups),
            _ => plan_error!("keep_together is '{name}'; it has to be group, rollout or None"),
        }
    }

    /// As the argument names it.
    pub fn name(self) -> &'static str {
        match self {
            Self::Rollouts => "rollout",
            Self::Groups => "group",
        }
    }
}

/// As [`schedule`](crate::balance::schedule), with the samples of a unit all on one rank. `unit_of` numbers the samples'
/// units with any numbers.
///
/// Units are dealt to ranks by cost and by tokens, and what needs fewer micro-batches is taken, or else what is more even.
/// Each rank then schedules its own samples.
pub fn schedule_units(
    step: usize,
    lengths: &[i64],
    costs: &[Cost],
    unit_of: &[usize],
    keep: Keep,
    shape: &Shape,
) -> Result<Bins> {
    let units = samples_of(unit_of);
    let alone = Shape { dp_size: 1, ..*shape };
    let (name, dp_size) = (keep.name(), shape.dp_size);
    if units.len() < dp_size && !shape.placeholders {
        return plan_error!(
            "step {step} has {} whole {name}s for dp_size {dp_size}, and keep_together='{name}' needs at least one on each \
             rank. Lower dp_size, take larger steps, pass placeholders=True, or leave keep_together out",
            units.len()
        );
    }
    let sum = |of: &dyn Fn(usize) -> Cost| -> Vec<Cost> {
        units.iter().map(|unit| total(unit.iter().map(|s| of(*s)))).collect()
    };
    let by_cost = sum(&|sample| costs[sample]);
    let by_tokens = sum(&|sample| Cost::from(lengths[sample].unsigned_abs()));
    let dealt = |weights: &[Cost]| -> Vec<Vec<usize>> {
        let ranks = partition(weights, dp_size).into_iter();
        ranks.map(|rank| rank.into_iter().flat_map(|unit| units[unit].iter().copied()).collect()).collect()
    };
    let of = |rank: &[usize]| rank.iter().map(|sample| lengths[*sample]).collect::<Vec<i64>>();
    let mut dealings = [dealt(&by_cost), dealt(&by_tokens)].map(|ranks| {
        let most = ranks.iter().map(|rank| bins(&of(rank), &alone).len()).max().unwrap_or(0);
        let heaviest = ranks.iter().map(|rank| total(rank.iter().map(|s| costs[*s]))).max().unwrap_or(0);
        ((alone.per_rank(most), heaviest), ranks)
    });
    dealings.sort_by_key(|(worth, _)| *worth);
    let [((most, _), ranks), _] = dealings;
    let per_rank = per_rank(step, most.saturating_mul(dp_size), shape)?;
    if let Some(few) = ranks.iter().map(Vec::len).find(|n| *n < per_rank && !shape.placeholders) {
        return plan_error!(
            "step {step} has {} on each rank, and with keep_together='{name}' one rank has only {} to fill them. Lower \
             dp_size or micro_batch_multiple, raise the budget of a micro-batch, pass \
             placeholders=True, or leave keep_together out",
            counted(per_rank, "micro-batch"),
            counted(few, "sample")
        );
    }
    let mut scheduled = Bins::default();
    for mut rank in ranks {
        rank.sort_unstable();
        let (lengths, costs) = (of(&rank), rank.iter().map(|s| costs[*s]).collect::<Vec<_>>());
        for micro_batch in place(bins(&lengths, &alone), &lengths, &costs, &alone, per_rank).iter() {
            scheduled.push(micro_batch.iter().map(|i| rank[*i]));
        }
    }
    Ok(scheduled)
}

/// The samples of each unit, units in the order of their first samples.
fn samples_of(unit_of: &[usize]) -> Vec<Vec<usize>> {
    let mut order: Vec<usize> = (0..unit_of.len()).collect();
    order.sort_by_key(|sample| unit_of[*sample]);
    let mut units: Vec<Vec<usize>> =
        order.chunk_by(|a, b| unit_of[*a] == unit_of[*b]).map(<[usize]>::to_vec).collect();
    units.sort_by_key(|unit| unit.first().copied());
    units
}
