//! What each mode means: one weight per sample. The loss of a step is Σ weight × mask × token loss, so weights add up
//! over micro-batches and ranks. A new mode is one arm of [`sample_weights`].

use crate::Result;
use crate::error::{counted, plan_error};

/// How per-token losses become the loss of a step.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Mode {
    SampleMean,
    PromptMean,
    TokenMean,
    Constant,
    /// A mean over micro-batches of each one's token mean: it depends on how the batch was cut, and is here so that old
    /// runs can be done again.
    TokenMeanLegacy,
}

impl Mode {
    pub const NAMES: [(&'static str, Self); 5] = [
        ("sample_mean", Self::SampleMean),
        ("prompt_mean", Self::PromptMean),
        ("token_mean", Self::TokenMean),
        ("constant", Self::Constant),
        ("token_mean_legacy", Self::TokenMeanLegacy),
    ];

    pub fn parse(name: &str) -> Result<Self> {
        match Self::NAMES.iter().find(|(n, _)| *n == name) {
            Some((_, mode)) => Ok(*mode),
            None => plan_error!(
                "loss_aggregation is '{name}'; it has to be one of {}",
                Self::NAMES.map(|(n, _)| n).join(", ")
            ),
        }
    }

    /// Checks that a divisor is there, finite and positive, exactly where the mode is `constant`.
    pub fn check_divisor(self, divisor: Option<f64>) -> Result<()> {
        match (self, divisor) {
            (Self::Constant, None) => {
                plan_error!("loss_aggregation 'constant' needs divisor=, a finite number above 0")
            }
            (Self::Constant, Some(d)) if !(d.is_normal() && d > 0.0) => {
                plan_error!("divisor is {d:?}; it has to be a finite number above 0 (at least 2.3e-308)")
            }
            (Self::Constant, Some(_)) | (_, None) => Ok(()),
            (_, Some(d)) => {
                plan_error!("divisor is {d}, and only loss_aggregation 'constant' takes one; leave it out")
            }
        }
    }
}

/// The counts of a step.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct Totals {
    pub num_rollouts: Option<i64>,
    pub num_prompts: Option<i64>,
    pub num_tokens: Option<i64>,
    /// Those with a trained token, of all ranks.
    pub num_micro_batches: Option<i64>,
    pub divisor: Option<f64>,
}

/// The weight of each of `num_samples` samples. 0 where the mean is over no trained token.
pub fn sample_weights(
    mode: Mode,
    num_samples: usize,
    rollout_mask_sums: Option<&[i64]>,
    prompt_mask_sums: Option<&[i64]>,
    micro_batch_mask_sums: Option<&[i64]>,
    totals: &Totals,
) -> Result<Vec<f64>> {
    mode.check_divisor(totals.divisor)?;
    for (name, given) in [("rollout_mask_sums", rollout_mask_sums), ("prompt_mask_sums", prompt_mask_sums)] {
        if given.is_some() {
            check_total(name, sums(name, given, num_samples)?, totals.num_tokens)?;
        }
    }
    match mode {
        Mode::SampleMean => means(
            "num_rollouts",
            count("num_rollouts", totals.num_rollouts)?,
            sums("rollout_mask_sums", rollout_mask_sums, num_samples)?,
        ),
        Mode::PromptMean => means(
            "num_prompts",
            count("num_prompts", totals.num_prompts)?,
            sums("prompt_mask_sums", prompt_mask_sums, num_samples)?,
        ),
        Mode::TokenMean => Ok(vec![inverse(count("num_tokens", totals.num_tokens)?); num_samples]),
        Mode::Constant => {
            let rollouts = count("num_rollouts", totals.num_rollouts)?;
            Ok(vec![inverse(rollouts * totals.divisor.unwrap_or(f64::NAN)); num_samples])
        }
        Mode::TokenMeanLegacy => means(
            "num_micro_batches",
            count("num_micro_batches", totals.num_micro_batches)?,
            sums("micro_batch_mask_sums", micro_batch_mask_sums, num_samples)?,
        ),
    }
}

/// Refuses a part that is larger than the whole.
fn check_total(name: &str, sums: &[i64], num_tokens: Option<i64>) -> Result<()> {
    match (sums.iter().max(), num_tokens) {
        (Some(sum), Some(tokens)) if *sum > tokens && tokens >= 0 => {
            plan_error!(
                "{name} holds {sum}, and num_tokens, the trained tokens of the whole step, is {tokens}"
            )
        }
        _ => Ok(()),
    }
}

/// 1 / (units × the mask sum of the sample's unit).
fn means(name: &str, units: f64, mask_sums: &[i64]) -> Result<Vec<f64>> {
    if units == 0.0 && mask_sums.iter().any(|m| *m > 0) {
        return plan_error!("{name} is 0, and there are trained tokens, which belong to one");
    }
    Ok(mask_sums.iter().map(|m| inverse(units * *m as f64)).collect())
}

fn inverse(x: f64) -> f64 {
    if x > 0.0 { 1.0 / x } else { 0.0 }
}

fn count(name: &str, value: Option<i64>) -> Result<f64> {
    match value {
        Some(n) if n >= 0 => Ok(n as f64),
        Some(n) => plan_error!("{name} is {n}; it cannot be negative"),
        None => missing(name),
    }
}

fn missing<T>(name: &str) -> Result<T> {
    plan_error!(
        "this loss_aggregation needs {name}{}",
        match name {
            _ if name.contains("prompt") =>
                ", which only a plan of that mode has: plan with loss_aggregation='prompt_mean'",
            _ if name.contains("micro_batch") =>
                ", which depends on the cut: plan with loss_aggregation='token_mean_legacy'",
            _ => "",
        }
    )
}

fn sums<'a>(name: &str, values: Option<&'a [i64]>, num_samples: usize) -> Result<&'a [i64]> {
    let Some(values) = values else {
        return missing(name);
    };
    if values.len() != num_samples {
        return plan_error!(
            "{name} has {} for {}",
            counted(values.len(), "value"),
            counted(num_samples, "sample")
        );
    }
    match values.iter().find(|m| **m < 0) {
        Some(m) => plan_error!("{name} holds {m}; a mask sum cannot be negative"),
        None => Ok(values),
    }
}
