//! Summary in, schedule out: steps, micro-batches, and the weight of every sample. Integers, but for the weights.

use std::iter::repeat_n;

use crate::arrays::show;
use crate::balance::{Limit, Shape, schedule};
use crate::bins::Bins;
use crate::cost::Cost;
use crate::cut::MAX_TOKENS;
use crate::error::plan_error;
use crate::ids::{Grouping, NO_ID, Numbered};
use crate::keep::{Keep, schedule_units};
use crate::options::{Options, over_budget, shape};
use crate::placed::{Placed, Placing, of};
use crate::steps::steps;
use crate::summary::Summary;
use crate::waits::{Waits, parts};
use crate::weights::{Mode, Totals, sample_weights};
use crate::{Error, Result};

/// The counts of one step.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Step {
    /// N: rollouts that count.
    pub num_rollouts: i64,
    /// P: prompt groups that count, where groups were read.
    pub num_prompts: Option<i64>,
    /// T: trained tokens.
    pub num_tokens: i64,
    /// K: micro-batches on each rank.
    pub num_micro_batches: i64,
}

/// Where every sample goes.
#[derive(Debug, Clone)]
pub struct Plan {
    pub steps: Vec<Step>,
    /// Where each micro-batch begins among the placed samples, in the same order, and the end.
    pub offsets: Vec<i64>,
    pub placed: Placed,
    pub dropped_rows: Vec<i64>,
    pub oversize_rows: Vec<i64>,
    /// True tokens over the tokens that the micro-batches have room for.
    pub fill: f64,
    /// What the slowest rank costs over what the mean rank costs: 1 is perfect.
    pub imbalance: f64,
}

/// Plans a summary.
pub fn plan(summary: &Summary, options: &Options) -> Result<Plan> {
    let per_step = shape(options)?;
    if summary.is_empty() {
        return Err(Error::Input("the summary has no rows: there is nothing to plan".to_owned()));
    }
    if options.mode == Mode::PromptMean && summary.group.is_empty() {
        return plan_error!(
            "loss_aggregation 'prompt_mean' needs prompt groups, and this summary has none; summarize with groups=True"
        );
    }
    if options.keep == Some(Keep::Groups) && summary.group.is_empty() {
        return plan_error!(
            "keep_together 'group' needs prompt groups, and this summary has none; summarize with groups=True"
        );
    }
    let numbered = number(summary)?;
    let whole_groups = match options {
        Options { mode: Mode::PromptMean, .. } => Some("prompt_mean"),
        Options { keep: Some(Keep::Groups), .. } => Some("keep_together='group'"),
        _ => None,
    };
    let describe = |sample: usize| match summary.group.last() {
        Some(ids) => format!("group {}", show(&ids.values, sample)),
        None => format!("the group of {}", summary.place(summary.row[sample])),
    };
    let cut_into = steps(
        &numbered.rollouts,
        numbered.groups.as_deref(),
        options.step_size,
        options.remainder,
        whole_groups,
        describe,
    )?;
    let mut planning = Planning {
        offsets: vec![0],
        placing: Placing {
            rollout_mask_sum: (!summary.key.is_empty()).then(Vec::new),
            prompt_mask_sum: (options.mode == Mode::PromptMean).then(Vec::new),
            ..Placing::default()
        },
        ..Planning::default()
    };
    let sums = MaskSums::new(&numbered, summary);
    for samples in &cut_into.samples {
        planning.add_step(samples, summary, &numbered, &sums, options, &per_step)?;
    }
    Ok(Plan {
        steps: planning.steps,
        offsets: planning.offsets,
        placed: planning.placing.finish(summary, &numbered),
        dropped_rows: cut_into.dropped.iter().map(|s| summary.row[*s]).collect(),
        oversize_rows: planning.oversize_rows,
        fill: planning.waits.fill(),
        imbalance: planning.waits.imbalance(),
    })
}

/// Refuses a micro-batch of more padded tokens than positions can count.
pub(crate) fn positions_fit(padded: i64) -> Result<()> {
    if padded <= MAX_TOKENS {
        return Ok(());
    }
    plan_error!(
        "a micro-batch would have {padded} padded tokens, and positions are int32; make micro-batches smaller"
    )
}

fn number(summary: &Summary) -> Result<Numbered> {
    let mut grouping = Grouping::default();
    let numbered = grouping.number(&summary.key, &summary.group, summary.len())?;
    if numbered.groups.is_some() {
        for (i, row) in summary.row.iter().enumerate() {
            let at = |row| summary.place(row);
            let one = grouping.one_group(&numbered, i, *row, &summary.key, &summary.group, at);
            one.map_err(|fault| summary.locate(fault))?;
        }
    }
    let mut ids = numbered.rollouts.iter().chain(numbered.groups.iter().flatten());
    if ids.any(|id| *id == NO_ID) {
        return Err(Error::Input("the summary has null ids".to_owned()));
    }
    Ok(numbered)
}

/// Mask sums per rollout and per group. A rollout is in one step, or dropped, as a whole, and so is a group that counts.
struct MaskSums {
    /// None where each row is a rollout.
    rollouts: Option<Vec<i64>>,
    /// Of use where groups are whole, so under `prompt_mean`.
    groups: Vec<i64>,
}

impl MaskSums {
    fn new(numbered: &Numbered, summary: &Summary) -> Self {
        let sum = |units: &[usize]| {
            let mut sums = vec![0; units.iter().max().map_or(0, |last| last + 1)];
            for (unit, mask_sum) in units.iter().zip(&summary.mask_sum) {
                sums[*unit] += mask_sum;
            }
            sums
        };
        Self {
            rollouts: (!summary.key.is_empty()).then(|| sum(&numbered.rollouts)),
            groups: numbered.groups.as_deref().map_or_else(Vec::new, sum),
        }
    }
}

/// How many different units the samples of a step belong to; those without a trained token in the step count where
/// `count_empty` says so.
fn units_of(samples: &[usize], units: &[usize], mask_sums: &[i64], count_empty: bool) -> i64 {
    let mut seen: Vec<(usize, bool)> = samples.iter().map(|s| (units[*s], mask_sums[*s] > 0)).collect();
    seen.sort_unstable_by_key(|(unit, trained)| (*unit, !trained));
    seen.dedup_by_key(|(unit, _)| *unit);
    seen.iter().filter(|(_, trained)| count_empty || *trained).count() as i64
}

/// A plan that is being made, step by step.
#[derive(Debug, Default)]
struct Planning {
    steps: Vec<Step>,
    offsets: Vec<i64>,
    placing: Placing,
    oversize_rows: Vec<i64>,
    waits: Waits,
}

impl Planning {
    fn add_step(
        &mut self,
        samples: &[usize],
        summary: &Summary,
        numbered: &Numbered,
        sums: &MaskSums,
        options: &Options,
        shape: &Shape,
    ) -> Result<()> {
        let index = self.steps.len();
        if u32::try_from(samples.len()).is_err() {
            return plan_error!(
                "step {index} has {} samples, and {} is the most; take smaller steps",
                samples.len(),
                u32::MAX
            );
        }
        let micro_batches = self.schedule(samples, summary, numbered, options, shape)?;
        let count = |units: &[usize]| units_of(samples, units, &summary.mask_sum, options.count_empty);
        let is_counted = |sample: &&usize| options.count_empty || summary.mask_sum[**sample] > 0;
        let step = Step {
            num_rollouts: match &sums.rollouts {
                None => samples.iter().filter(is_counted).count() as i64,
                Some(_) => count(&numbered.rollouts),
            },
            num_prompts: numbered.groups.as_deref().map(count),
            num_tokens: samples.iter().map(|s| summary.mask_sum[*s]).sum(),
            num_micro_batches: (micro_batches.len() / shape.dp_size) as i64,
        };
        let Placing { sample, total_length, mask_sum, rollout_mask_sum, prompt_mask_sum, sample_weight } =
            &mut self.placing;
        let first = sample.len();
        for micro_batch in micro_batches.iter() {
            sample.extend(micro_batch.iter().map(|i| samples[*i] as i64));
            self.offsets.push(sample.len() as i64);
        }
        // Column by column: each is read in no order at all, and one by itself stays in the cache.
        let placed = &sample[first..];
        total_length.extend(of(placed, &summary.total_length));
        mask_sum.extend(of(placed, &summary.mask_sum));
        if let (Some(column), Some(sums)) = (rollout_mask_sum.as_mut(), &sums.rollouts) {
            column.extend(of(placed, &numbered.rollouts).map(|rollout| sums[rollout]));
        }
        if let (Some(column), Some(groups)) = (prompt_mask_sum.as_mut(), &numbered.groups) {
            column.extend(of(placed, groups).map(|group| sums.groups[group]));
        }
        let sizes = || micro_batches.iter().map(<[_]>::len);
        self.waits.add(sizes(), &total_length[first..], options, shape)?;
        let legacy = options.mode == Mode::TokenMeanLegacy;
        let of_micro_batches: Vec<i64> = if legacy {
            parts(sizes(), &mask_sum[first..]).map(|m| m.iter().sum()).collect()
        } else {
            Vec::new()
        };
        let micro_batch_mask_sums: Vec<i64> =
            of_micro_batches.iter().zip(sizes()).flat_map(|(sum, size)| repeat_n(*sum, size)).collect();
        let mut weights = sample_weights(
            options.mode,
            samples.len(),
            Some(&rollout_mask_sum.as_ref().unwrap_or(mask_sum)[first..]),
            prompt_mask_sum.as_deref().map(|sums| &sums[first..]),
            legacy.then_some(&micro_batch_mask_sums[..]),
            &Totals {
                num_rollouts: Some(step.num_rollouts),
                num_prompts: step.num_prompts,
                num_tokens: Some(step.num_tokens),
                num_micro_batches: Some(of_micro_batches.iter().filter(|sum| **sum > 0).count() as i64),
                divisor: options.divisor,
            },
        )?;
        if sample_weight.is_empty() {
            *sample_weight = weights;
        } else {
            sample_weight.append(&mut weights);
        }
        self.steps.push(step);
        Ok(())
    }

    /// The micro-batches of the next step. What this works with is freed before columns are made of it: memory that is
    /// new to the process takes as long to get as to fill.
    fn schedule(
        &mut self,
        samples: &[usize],
        summary: &Summary,
        numbered: &Numbered,
        options: &Options,
        shape: &Shape,
    ) -> Result<Bins> {
        let index = self.steps.len();
        let lengths: Vec<i64> =
            samples.iter().map(|s| options.cut.padded(summary.total_length[*s])).collect();
        if let Limit::Tokens(capacity) = shape.limit {
            for (sample, padded) in samples.iter().zip(&lengths).filter(|(_, padded)| **padded > capacity) {
                self.oversize(*sample, *padded, summary, options)?;
            }
        }
        let costs: Vec<Cost> = lengths.iter().map(|s| options.cost.cost(*s)).collect();
        let units = options.keep.and_then(|keep| {
            let units = match keep {
                Keep::Rollouts => &numbered.rollouts,
                Keep::Groups => numbered.groups.as_ref()?,
            };
            Some((keep, samples.iter().map(|s| units[*s]).collect::<Vec<_>>()))
        });
        match units {
            Some((keep, units)) => schedule_units(index, &lengths, &costs, &units, keep, shape),
            None => schedule(index, &lengths, &costs, shape),
        }
    }

    fn oversize(&mut self, sample: usize, padded: i64, summary: &Summary, options: &Options) -> Result<()> {
        let (row, length) = (summary.row[sample], summary.total_length[sample]);
        if options.oversize_alone {
            self.oversize_rows.push(row);
            return Ok(());
        }
        Err(over_budget(&summary.place(row), length, padded, options))
    }
}
