//! Which samples make up an optimizer step.

use crate::Result;
use crate::error::{counted, plan_error};

/// What a step counts.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum StepSize {
    /// All of the data is one step.
    Whole,
    /// `global_batch_size` rollouts.
    Rollouts(usize),
    /// `prompts_per_step` whole prompt groups.
    Prompts(usize),
}

impl StepSize {
    pub fn of(global_batch_size: Option<i64>, prompts_per_step: Option<i64>) -> Result<Self> {
        let size = |name: &str, n: i64| match usize::try_from(n) {
            Ok(n) if n > 0 => Ok(n),
            _ => plan_error!("{name} is {n}; it has to be at least 1"),
        };
        match (global_batch_size, prompts_per_step) {
            (None, None) => Ok(Self::Whole),
            (Some(n), None) => Ok(Self::Rollouts(size("global_batch_size", n)?)),
            (None, Some(n)) => Ok(Self::Prompts(size("prompts_per_step", n)?)),
            _ => plan_error!("pass at most one of global_batch_size and prompts_per_step"),
        }
    }
}

/// What becomes of an incomplete last step.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Remainder {
    Error,
    Drop,
    Keep,
}

impl Remainder {
    pub fn parse(name: &str) -> Result<Self> {
        match name {
            "error" => Ok(Self::Error),
            "drop" => Ok(Self::Drop),
            "keep" => Ok(Self::Keep),
            _ => plan_error!("remainder is '{name}'; it has to be error, drop or keep"),
        }
    }
}

/// The samples of each step in input order, and those that are dropped.
#[derive(Debug, PartialEq, Eq)]
pub struct Steps {
    pub samples: Vec<Vec<usize>>,
    pub dropped: Vec<usize>,
}

/// Cuts samples into steps. `rollouts` and `groups` number each sample's rollout and group in first-seen order.
/// `whole_groups`: who needs it that no group lies in two steps; `describe` names a group for the error.
pub fn steps(
    rollouts: &[usize],
    groups: Option<&[usize]>,
    size: StepSize,
    remainder: Remainder,
    whole_groups: Option<&str>,
    describe: impl Fn(usize) -> String,
) -> Result<Steps> {
    let (units, per_step, name, what): (&[usize], usize, &str, &str) = match (size, groups) {
        (StepSize::Whole, _) => {
            return Ok(Steps { samples: vec![(0..rollouts.len()).collect()], dropped: Vec::new() });
        }
        (StepSize::Rollouts(n), _) => (rollouts, n, "global_batch_size", "rollout"),
        (StepSize::Prompts(n), Some(groups)) => (groups, n, "prompts_per_step", "prompt group"),
        (StepSize::Prompts(_), None) => {
            return plan_error!("prompts_per_step needs groups; summarize with groups=True");
        }
    };
    if per_step == 0 {
        return plan_error!("{name} is 0; it has to be at least 1");
    }
    let num_units = units.iter().max().map_or(0, |last| last + 1);
    let rest = num_units % per_step;
    let (full, mut num_steps) = (num_units / per_step, num_units.div_ceil(per_step));
    let mut samples = vec![Vec::new(); num_steps];
    for (sample, unit) in units.iter().enumerate() {
        samples[unit / per_step].push(sample);
    }
    if let (Some(who), Some(groups)) = (whole_groups, groups) {
        whole(&samples, groups, name, per_step, who, describe)?;
    }
    let mut dropped = Vec::new();
    if rest != 0 {
        match remainder {
            Remainder::Keep => {}
            Remainder::Error => {
                return plan_error!(
                    "{} cannot be divided into steps of {name} {per_step}: {rest} left over. Pass remainder='drop' or \
                     remainder='keep', or another {name}",
                    counted(num_units, what)
                );
            }
            Remainder::Drop => {
                num_steps = full;
                dropped = samples.pop().unwrap_or_default();
            }
        }
    }
    if num_steps == 0 {
        return plan_error!(
            "{} make less than one step of {name} {per_step}, and remainder='drop' leaves nothing; lower \
             {name} or pass remainder='keep'",
            counted(num_units, what)
        );
    }
    Ok(Steps { samples, dropped })
}

fn whole(
    samples: &[Vec<usize>],
    groups: &[usize],
    name: &str,
    per_step: usize,
    who: &str,
    describe: impl Fn(usize) -> String,
) -> Result<()> {
    let num_groups = groups.iter().max().map_or(0, |last| last + 1);
    let mut step_of = vec![usize::MAX; num_groups];
    for (step, sample) in samples.iter().enumerate().flat_map(|(i, s)| s.iter().map(move |s| (i, *s))) {
        let known = &mut step_of[groups[sample]];
        if *known != usize::MAX && *known != step {
            return plan_error!(
                "{name} {per_step} cuts {} between steps {known} and {step}, and {who} needs whole groups. Use \
                 prompts_per_step=, or a {name} that falls between groups",
                describe(sample)
            );
        }
        *known = step;
    }
    Ok(())
}
