//! The meaning of each mode. Values are worked out by hand from section 3 of the design.
#![allow(clippy::unwrap_used)] // a test that cannot go on has failed

mod common;

use common::{cases, plan_error};
use proptest::prelude::*;
use rollpack_core::weights::{Mode, Totals, sample_weights};

fn totals(rollouts: i64, prompts: i64, tokens: i64) -> Totals {
    Totals {
        num_rollouts: Some(rollouts),
        num_prompts: Some(prompts),
        num_tokens: Some(tokens),
        ..Totals::default()
    }
}

/// One example: the sums of trained losses and the mask sums, per sample.
struct Example {
    losses: &'static [f64],
    rollouts: &'static [i64],
    prompts: Option<&'static [i64]>,
    totals: Totals,
    divisor: f64,
}

impl Example {
    fn weights(&self, mode: Mode) -> Vec<f64> {
        let divisor = (mode == Mode::Constant).then_some(self.divisor);
        let totals = Totals { divisor, ..self.totals };
        sample_weights(mode, self.losses.len(), Some(self.rollouts), self.prompts, None, &totals).unwrap()
    }

    #[track_caller]
    fn has_loss(&self, mode: Mode, expected: f64) {
        let loss: f64 = self.weights(mode).iter().zip(self.losses).map(|(w, x)| w * x).sum();
        assert!((loss - expected).abs() <= 1e-14 * expected, "{mode:?}: {loss} is not {expected}");
    }
}

#[test]
fn four_samples_in_two_groups() {
    // Losses [4], [1 2 3], [10 20], [1 100 2 3] under masks [1], [1 1 1], [1 1], [1 0 1 1].
    let example = Example {
        losses: &[4.0, 6.0, 30.0, 6.0],
        rollouts: &[1, 3, 2, 3],
        prompts: Some(&[4, 4, 5, 5]),
        totals: totals(4, 2, 9),
        divisor: 10.0,
    };
    assert_eq!(example.weights(Mode::SampleMean), [1.0 / 4.0, 1.0 / 12.0, 1.0 / 8.0, 1.0 / 12.0]);
    assert_eq!(example.weights(Mode::PromptMean), [1.0 / 8.0, 1.0 / 8.0, 1.0 / 10.0, 1.0 / 10.0]);
    assert_eq!(example.weights(Mode::TokenMean), [1.0 / 9.0; 4]);
    assert_eq!(example.weights(Mode::Constant), [1.0 / 40.0; 4]);
    example.has_loss(Mode::SampleMean, 5.75);
    example.has_loss(Mode::PromptMean, 4.85);
    example.has_loss(Mode::TokenMean, 46.0 / 9.0);
    example.has_loss(Mode::Constant, 1.15);
}

#[test]
fn a_rollout_that_fans_out_counts_once() {
    // Rollout A has [8] and [1 1 1], rollout B has [5 5].
    let example = Example {
        losses: &[8.0, 3.0, 10.0],
        rollouts: &[4, 4, 2],
        prompts: None,
        totals: totals(2, 0, 6),
        divisor: 1.0,
    };
    assert_eq!(example.weights(Mode::SampleMean), [1.0 / 8.0, 1.0 / 8.0, 1.0 / 4.0]);
    example.has_loss(Mode::SampleMean, 3.875);
}

#[test]
fn groups_may_be_uneven() {
    // Eleven one-token samples in groups of 4, 3 and 4, losses 1, 2 and 6.
    let example = Example {
        losses: &[1.0, 1.0, 1.0, 1.0, 2.0, 2.0, 2.0, 6.0, 6.0, 6.0, 6.0],
        rollouts: &[1; 11],
        prompts: Some(&[4, 4, 4, 4, 3, 3, 3, 4, 4, 4, 4]),
        totals: totals(11, 3, 11),
        divisor: 1.0,
    };
    example.has_loss(Mode::PromptMean, 3.0);
    example.has_loss(Mode::SampleMean, 34.0 / 11.0);
    example.has_loss(Mode::TokenMean, 34.0 / 11.0);
}

#[test]
fn all_four_modes_apart() {
    // Group 0: 1 token at 10, 3 tokens at 2. Group 1: 2 tokens at 4, 6 tokens at 1.
    let example = Example {
        losses: &[10.0, 6.0, 8.0, 6.0],
        rollouts: &[1, 3, 2, 6],
        prompts: Some(&[4, 4, 8, 8]),
        totals: totals(4, 2, 12),
        divisor: 16.0,
    };
    example.has_loss(Mode::SampleMean, 17.0 / 4.0);
    example.has_loss(Mode::PromptMean, 23.0 / 8.0);
    example.has_loss(Mode::TokenMean, 5.0 / 2.0);
    example.has_loss(Mode::Constant, 15.0 / 32.0);
}

#[test]
fn what_has_no_trained_token_weighs_nothing() {
    let sums = [0, 2, 0];
    let weigh = |mode, totals| sample_weights(mode, 3, Some(&sums), Some(&sums), None, &totals).unwrap();
    assert_eq!(weigh(Mode::SampleMean, totals(3, 3, 2)), [0.0, 1.0 / 6.0, 0.0]);
    assert_eq!(weigh(Mode::PromptMean, totals(2, 1, 2)), [0.0, 1.0 / 2.0, 0.0]);

    let none = |mode, divisor| {
        sample_weights(mode, 2, Some(&[0, 0]), Some(&[0, 0]), None, &Totals { divisor, ..totals(0, 0, 0) })
            .unwrap()
    };
    assert_eq!(none(Mode::SampleMean, None), [0.0, 0.0]);
    assert_eq!(none(Mode::PromptMean, None), [0.0, 0.0]);
    assert_eq!(none(Mode::TokenMean, None), [0.0, 0.0]);
    assert_eq!(none(Mode::Constant, Some(2.0)), [0.0, 0.0]);
}

#[test]
fn no_samples_have_no_weights() {
    assert!(sample_weights(Mode::SampleMean, 0, Some(&[]), None, None, &totals(1, 1, 1)).unwrap().is_empty());
    assert!(sample_weights(Mode::TokenMean, 0, None, None, None, &totals(1, 1, 1)).unwrap().is_empty());
}

#[test]
fn constant_needs_a_finite_positive_divisor() {
    for divisor in [f64::NAN, f64::INFINITY, f64::NEG_INFINITY, 0.0, -0.0, -1.0] {
        let totals = Totals { divisor: Some(divisor), ..totals(1, 1, 1) };
        plan_error(
            sample_weights(Mode::Constant, 1, None, None, None, &totals),
            &["divisor is", "finite", "above 0"],
        );
        plan_error(Mode::Constant.check_divisor(Some(divisor)), &["divisor is"]);
    }
    plan_error(
        sample_weights(Mode::Constant, 1, None, None, None, &totals(1, 1, 1)),
        &["'constant' needs divisor="],
    );
    assert!(Mode::Constant.check_divisor(Some(1e-3)).is_ok());
}

#[test]
fn the_other_modes_take_no_divisor() {
    for mode in [Mode::SampleMean, Mode::PromptMean, Mode::TokenMean] {
        for divisor in [1.0, f64::NAN, 0.0] {
            let totals = Totals { divisor: Some(divisor), ..totals(1, 1, 1) };
            let weights = sample_weights(mode, 1, Some(&[1]), Some(&[1]), None, &totals);
            plan_error(weights, &["divisor is", "only loss_aggregation 'constant' takes one"]);
        }
        assert!(mode.check_divisor(None).is_ok());
    }
}

#[test]
fn what_a_mode_needs_has_to_be_there() {
    let weigh = |mode, rollouts, prompts, totals| sample_weights(mode, 2, rollouts, prompts, None, &totals);
    let sums: Option<&[i64]> = Some(&[1, 1]);
    let none = Totals::default();
    plan_error(weigh(Mode::SampleMean, None, sums, totals(2, 2, 2)), &["rollout_mask_sums"]);
    plan_error(weigh(Mode::SampleMean, sums, sums, none), &["num_rollouts"]);
    plan_error(weigh(Mode::PromptMean, sums, None, totals(2, 2, 2)), &["prompt_mask_sums", "'prompt_mean'"]);
    plan_error(weigh(Mode::PromptMean, sums, sums, none), &["num_prompts"]);
    plan_error(weigh(Mode::TokenMean, sums, sums, none), &["num_tokens"]);
    plan_error(weigh(Mode::Constant, None, None, Totals { divisor: Some(1.0), ..none }), &["num_rollouts"]);
    // And nothing else has to.
    assert!(weigh(Mode::TokenMean, None, None, Totals { num_tokens: Some(2), ..none }).is_ok());
    assert!(weigh(Mode::SampleMean, sums, None, Totals { num_rollouts: Some(2), ..none }).is_ok());
    assert!(weigh(Mode::PromptMean, None, sums, Totals { num_prompts: Some(2), ..none }).is_ok());
}

#[test]
fn counts_and_sums_that_cannot_be_are_refused() {
    let weigh = |mode, sums: &[i64], totals: Totals| match mode {
        Mode::PromptMean => sample_weights(mode, 2, None, Some(sums), None, &totals),
        _ => sample_weights(mode, 2, Some(sums), None, None, &totals),
    };
    plan_error(
        weigh(Mode::SampleMean, &[1, -3], totals(2, 2, 2)),
        &["rollout_mask_sums holds -3", "negative"],
    );
    plan_error(
        weigh(Mode::PromptMean, &[-1, 3], totals(2, 2, 3)),
        &["prompt_mask_sums holds -1", "negative"],
    );
    for mode in [Mode::SampleMean, Mode::TokenMean] {
        plan_error(
            weigh(mode, &[1, 4], totals(2, 2, 3)),
            &["rollout_mask_sums holds 4, and num_tokens, the trained tokens of the whole step, is 3"],
        );
    }
    plan_error(
        weigh(Mode::PromptMean, &[1, 4], totals(2, 2, 3)),
        &["prompt_mask_sums holds 4, and num_tokens"],
    );
    plan_error(
        weigh(Mode::SampleMean, &[1], totals(2, 2, 2)),
        &["rollout_mask_sums", "1 value for", "2 samples"],
    );
    plan_error(weigh(Mode::PromptMean, &[1, 1, 1], totals(2, 2, 2)), &["3 values", "2 samples"]);
    for mode in [Mode::SampleMean, Mode::TokenMean] {
        plan_error(
            sample_weights(mode, 2, Some(&[1, 1]), Some(&[1, 1, 1]), None, &totals(2, 2, 2)),
            &["prompt_mask_sums has 3 values for 2 samples"], // read or not
        );
    }
    plan_error(weigh(Mode::SampleMean, &[1, 1], totals(-1, 2, 2)), &["num_rollouts is -1", "negative"]);
    plan_error(weigh(Mode::PromptMean, &[1, 1], totals(1, -2, 2)), &["num_prompts is -2", "negative"]);
    plan_error(weigh(Mode::TokenMean, &[1, 1], totals(1, 1, -5)), &["num_tokens is -5", "negative"]);
    plan_error(weigh(Mode::SampleMean, &[0, 1], totals(0, 1, 1)), &["num_rollouts is 0", "trained tokens"]);
    plan_error(weigh(Mode::PromptMean, &[0, 1], totals(1, 0, 1)), &["num_prompts is 0", "trained tokens"]);
}

#[test]
fn modes_have_the_names_of_the_design() {
    for (name, mode) in [
        ("sample_mean", Mode::SampleMean),
        ("prompt_mean", Mode::PromptMean),
        ("token_mean", Mode::TokenMean),
        ("constant", Mode::Constant),
    ] {
        assert_eq!(Mode::parse(name), Ok(mode));
    }
    plan_error(Mode::parse("dapo"), &["'dapo'", "sample_mean, prompt_mean, token_mean, constant"]);
}

proptest! {
    #![proptest_config(cases(200))]

    /// The weights of a step are a mean: over what is trained they add up to the share of trained units.
    #[test]
    fn weights_add_up_to_a_mean(sums in prop::collection::vec(0..1_000_000_i64, 1..50)) {
        let (units, trained) = (sums.len() as i64, sums.iter().filter(|m| **m > 0).count());
        let tokens: i64 = sums.iter().sum();
        let total = |mode| -> f64 {
            let weights =
                sample_weights(mode, sums.len(), Some(&sums), Some(&sums), None, &totals(units, units, tokens)).unwrap();
            weights.iter().zip(&sums).map(|(w, m)| w * *m as f64).sum()
        };
        let share = trained as f64 / units as f64;
        prop_assert!((total(Mode::SampleMean) - share).abs() < 1e-12);
        prop_assert!((total(Mode::PromptMean) - share).abs() < 1e-12);
        prop_assert!((total(Mode::TokenMean) - f64::from(u8::from(tokens > 0))).abs() < 1e-12);
    }
}

/// Two micro-batches of two samples each, and one without a trained token: the mean of token means 4/2 and 10/5 of them.
#[test]
fn token_mean_legacy_is_a_mean_over_micro_batches() {
    let sums = [2, 2, 5, 5, 0];
    let totals = Totals { num_micro_batches: Some(2), ..Totals::default() };
    let weigh = |sums, totals| sample_weights(Mode::TokenMeanLegacy, 5, None, None, sums, totals);
    assert_eq!(weigh(Some(&sums[..]), &totals).unwrap(), [0.25, 0.25, 0.1, 0.1, 0.0]);
    plan_error(
        weigh(None, &totals),
        &["micro_batch_mask_sums", "plan with loss_aggregation='token_mean_legacy'"],
    );
    plan_error(weigh(Some(&sums[..]), &Totals::default()), &["num_micro_batches", "depends on the cut"]);
}
