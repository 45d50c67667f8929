//! The arguments of a plan, as callers spell them.
#![allow(clippy::unwrap_used)] // a test that cannot go on has failed

mod common;

use common::plan_error;
use rollpack_core::options::{Budget, count_empty, oversize_alone};
use rollpack_core::steps::StepSize;

#[test]
fn a_micro_batch_is_limited_by_exactly_one_thing() {
    assert_eq!(Budget::of(Some(7), None).unwrap(), Budget::TokensPerGpu(7));
    assert_eq!(Budget::of(None, Some(3)).unwrap(), Budget::Samples(3));
    for (tokens, samples) in [(None, None), (Some(7), Some(3))] {
        plan_error(Budget::of(tokens, samples), &["exactly one of max_tokens_per_gpu and micro_batch_size"]);
    }
}

#[test]
fn a_step_counts_at_most_one_thing_and_at_least_one_of_it() {
    assert_eq!(StepSize::of(None, None).unwrap(), StepSize::Whole);
    assert_eq!(StepSize::of(Some(1), None).unwrap(), StepSize::Rollouts(1));
    assert_eq!(StepSize::of(None, Some(4)).unwrap(), StepSize::Prompts(4));
    plan_error(StepSize::of(Some(1), Some(1)), &["at most one of global_batch_size and prompts_per_step"]);
    for wrong in [0, -3] {
        let text = format!("is {wrong}; it has to be at least 1");
        plan_error(StepSize::of(Some(wrong), None), &["global_batch_size", &text]);
        plan_error(StepSize::of(None, Some(wrong)), &["prompts_per_step", &text]);
    }
}

#[test]
fn words_are_those_of_the_design() {
    assert!(count_empty("count").unwrap());
    assert!(!count_empty("skip").unwrap());
    plan_error(count_empty("drop"), &["empty is 'drop'; it has to be count or skip"]);
    assert!(oversize_alone("alone").unwrap());
    assert!(!oversize_alone("error").unwrap());
    plan_error(oversize_alone("cut"), &["oversize is 'cut'; it has to be error or alone"]);
}
