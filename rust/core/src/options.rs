//! The arguments of a plan, and what can be checked of them without data.

use crate::balance::{Limit, Shape, Sync};
use crate::cost::CostModel;
use crate::cut::{Cut, MAX_TOKENS};
use crate::error::{counted, plan_error};
use crate::keep::Keep;
use crate::steps::{Remainder, StepSize};
use crate::weights::Mode;
use crate::{Error, Result};

/// What limits a micro-batch, as the caller says it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Budget {
    /// Padded tokens on one GPU; a micro-batch holds this many on each of its cp ranks.
    TokensPerGpu(i64),
    Samples(i64),
}

impl Budget {
    pub fn of(max_tokens_per_gpu: Option<i64>, micro_batch_size: Option<i64>) -> Result<Self> {
        match (max_tokens_per_gpu, micro_batch_size) {
            (Some(tokens), None) => Ok(Self::TokensPerGpu(tokens)),
            (None, Some(samples)) => Ok(Self::Samples(samples)),
            _ => plan_error!("pass exactly one of max_tokens_per_gpu and micro_batch_size"),
        }
    }
}

/// The arguments of `rollpack.plan`.
#[derive(Debug, Clone, Copy)]
#[allow(clippy::struct_excessive_bools)] // each is a public argument with a name of its own
pub struct Options {
    pub mode: Mode,
    pub divisor: Option<f64>,
    /// Whether a rollout or group without a trained token counts in N and P.
    pub count_empty: bool,
    pub budget: Budget,
    pub dp_size: i64,
    pub cut: Cut,
    pub step_size: StepSize,
    pub remainder: Remainder,
    /// Whether a sample over the budget is alone in its micro-batch instead of an error.
    pub oversize_alone: bool,
    pub placeholders: bool,
    pub micro_batch_multiple: i64,
    pub cost: CostModel,
    pub sync: Sync,
    /// What has to be on one rank as a whole.
    pub keep: Option<Keep>,
}

/// Whether `empty=` counts rollouts and groups without a trained token.
pub fn count_empty(empty: &str) -> Result<bool> {
    match empty {
        "count" => Ok(true),
        "skip" => Ok(false),
        _ => plan_error!("empty is '{empty}'; it has to be count or skip"),
    }
}

/// Whether `oversize=` gives a sample over the budget a micro-batch of its own.
pub fn oversize_alone(oversize: &str) -> Result<bool> {
    match oversize {
        "error" => Ok(false),
        "alone" => Ok(true),
        _ => plan_error!("oversize is '{oversize}'; it has to be error or alone"),
    }
}

/// The shape of every step's schedule. Checks all arguments that can be checked without data.
pub fn shape(options: &Options) -> Result<Shape> {
    options.mode.check_divisor(options.divisor)?;
    Ok(Shape {
        dp_size: positive("dp_size", options.dp_size)?,
        limit: match options.budget {
            Budget::TokensPerGpu(budget) => Limit::Tokens(capacity(budget, options)?),
            Budget::Samples(n) => Limit::Samples(positive("micro_batch_size", n)?),
        },
        multiple: positive("micro_batch_multiple", options.micro_batch_multiple)?,
        placeholders: options.placeholders,
        sync: options.sync,
    })
}

fn positive(name: &str, value: i64) -> Result<usize> {
    if (1..=MAX_TOKENS).contains(&value) {
        Ok(value as usize)
    } else {
        plan_error!("{name} is {value}; it has to be from 1 to {MAX_TOKENS}")
    }
}

/// What fits into a micro-batch, over all its cp ranks.
fn capacity(max_tokens_per_gpu: i64, options: &Options) -> Result<i64> {
    if max_tokens_per_gpu < 1 {
        return plan_error!("max_tokens_per_gpu is {max_tokens_per_gpu}; it has to be at least 1");
    }
    let budget = max_tokens_per_gpu.saturating_mul(options.cut.cp_size);
    let capacity = options.cut.capacity(budget);
    let least = options.cut.padded_total(options.cut.padded(1));
    if capacity < least && !options.oversize_alone {
        return plan_error!(
            "a budget of max_tokens_per_gpu {max_tokens_per_gpu} x cp_size {} does not hold one padded token, which takes \
             {least}; raise max_tokens_per_gpu or lower the padding",
            options.cut.cp_size
        );
    }
    Ok(capacity)
}

/// What a sample that is longer than a micro-batch is told.
pub(crate) fn over_budget(row: &str, length: i64, padded: i64, options: &Options) -> Error {
    let (cp_size, cut) = (options.cut.cp_size, &options.cut);
    let per_gpu = match options.budget {
        Budget::TokensPerGpu(tokens) | Budget::Samples(tokens) => tokens,
    };
    Error::Plan(format!(
        "{row} has {} ({} padded), and the budget is {} (max_tokens_per_gpu {per_gpu} x cp_size \
         {cp_size}). Raise max_tokens_per_gpu, or pass oversize='alone' to give it a micro-batch of its own",
        counted(length, "token"),
        cut.padded_total(padded),
        per_gpu.saturating_mul(cp_size)
    ))
}
