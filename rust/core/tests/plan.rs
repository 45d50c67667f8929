//! From a summary to a schedule: the rules of planning, by hand and for all input.
#![allow(clippy::unwrap_used, clippy::panic)] // a test that cannot go on has failed

mod common;

use std::collections::{BTreeMap, BTreeSet};

use arrow_array::cast::AsArray;
use arrow_array::types::{Float64Type, Int64Type};
use common::{cases, cut, grouped, int64, lcm, lengths, lists, options, plan_error, read, rows, says, up};
use proptest::prelude::*;
use rollpack_core::balance::Sync;
use rollpack_core::cost::CostModel;
use rollpack_core::cut::{Cut, Layout};
use rollpack_core::keep::Keep;
use rollpack_core::options::{Budget, Options, shape};
use rollpack_core::plan::{Plan, Step, plan};
use rollpack_core::steps::{Remainder, StepSize};
use rollpack_core::summary::Summary;
use rollpack_core::weights::Mode;

/// The rows of each micro-batch, rank after rank.
fn micro_batches(plan: &Plan) -> Vec<Vec<i64>> {
    plan.offsets.windows(2).map(|w| plan.placed.row[w[0] as usize..w[1] as usize].to_vec()).collect()
}

/// The rows of each step, sorted.
fn rows_of_steps(plan: &Plan, dp_size: i64) -> Vec<Vec<i64>> {
    let all = micro_batches(plan);
    let mut rest = all.as_slice();
    let mut steps = Vec::new();
    for step in &plan.steps {
        let (now, later) = rest.split_at((step.num_micro_batches * dp_size) as usize);
        rest = later;
        let mut rows = now.concat();
        rows.sort_unstable();
        steps.push(rows);
    }
    assert!(rest.is_empty());
    steps
}

fn num_micro_batches(lengths_of_rows: &[i64], options: &Options) -> Vec<i64> {
    plan(&lengths(lengths_of_rows), options).unwrap().steps.iter().map(|s| s.num_micro_batches).collect()
}

/// The weight of each row.
fn weights(plan: &Plan) -> BTreeMap<i64, f64> {
    plan.placed.row.iter().copied().zip(plan.placed.sample_weight.iter().copied()).collect()
}

// Budgets

#[test]
fn padding_counts_against_the_budget() {
    // 5 5 5 under cp 2 zigzag is 8 8 8, and a micro-batch holds 8 tokens on each of 2 ranks.
    let zigzag = Options { cut: cut(2, Layout::Zigzag), ..options(8) };
    assert_eq!(num_micro_batches(&[5, 5, 5], &zigzag), [2]);
    // Contiguous pads 15 to 16 and needs one.
    let contiguous = Options { cut: cut(2, Layout::Contiguous), ..options(8) };
    assert_eq!(num_micro_batches(&[5, 5, 5], &contiguous), [1]);
    // A pad of 8 per sequence, without cp.
    let padded = Options { cut: Cut::new(1, Layout::Zigzag, 8, 1).unwrap(), ..options(16) };
    assert_eq!(num_micro_batches(&[5, 5, 5], &padded), [2]);
    // Micro-batches of a multiple of 10 under a budget of 19 hold 10.
    let whole = Options { cut: Cut::new(1, Layout::Zigzag, 1, 10).unwrap(), ..options(19) };
    assert_eq!(num_micro_batches(&[5, 5, 5], &whole), [2]);
}

#[test]
fn the_examples_of_the_issue() {
    assert_eq!(num_micro_batches(&[7; 8], &options(8)), [8]);
    assert_eq!(num_micro_batches(&[4, 4, 4, 1, 1, 1], &Options { dp_size: 2, ..options(4) }), [2]);
    assert_eq!(num_micro_batches(&[7, 5, 3, 5], &options(10)), [2]);
    assert_eq!(num_micro_batches(&[3, 3, 3, 7, 7, 7], &options(10)), [3]);
}

#[test]
fn equal_counts() {
    let many: Vec<i64> = (0..206).map(|i| 1 + (i * 37) % 101).collect();
    for sync in [Sync::Step, Sync::MicroBatch] {
        let options = Options { budget: Budget::Samples(8), dp_size: 4, sync, ..options(1) };
        let plan = plan(&lengths(&many), &options).unwrap();
        let all = micro_batches(&plan);
        let mut ranks: Vec<usize> = all.chunks(all.len() / 4).map(|r| r.concat().len()).collect();
        ranks.sort_unstable();
        assert_eq!(ranks, [51, 51, 52, 52]);
    }
}

#[test]
fn a_sample_over_the_budget_is_an_error_that_names_it() {
    plan_error(
        plan(&lengths(&[3, 15]), &options(10)),
        &[
            "row 1 has 15 tokens",
            "(15 padded)",
            "the budget is 10",
            "max_tokens_per_gpu 10",
            "oversize='alone'",
        ],
    );
    // Padded: 13 become 16 under zigzag, and 2 x 7 = 14 hold 12.
    let zigzag = Options { cut: cut(2, Layout::Zigzag), ..options(7) };
    plan_error(plan(&lengths(&[13]), &zigzag), &["row 0 has 13 tokens (16 padded)", "is 14", "cp_size 2"]);
}

#[test]
fn a_sample_over_the_budget_can_be_alone() {
    let alone = Options { oversize_alone: true, ..options(10) };
    let plan_of = |lengths_of_rows: &[i64]| plan(&lengths(lengths_of_rows), &alone).unwrap();
    let three = plan_of(&[15, 3, 3]);
    assert_eq!(three.oversize_rows, [0]);
    let mut found = micro_batches(&three);
    found.sort();
    assert_eq!(found, [vec![0], vec![1, 2]]);
    let two = plan_of(&[3, 15]);
    assert_eq!(two.oversize_rows, [1]);
    assert_eq!(two.steps[0].num_micro_batches, 2);
    assert!(plan_of(&[3, 7]).oversize_rows.is_empty());
}

#[test]
fn a_budget_that_holds_no_token() {
    let tight = Options { cut: cut(2, Layout::Zigzag), ..options(1) };
    plan_error(
        plan(&lengths(&[2]), &tight),
        &["max_tokens_per_gpu 1 x cp_size 2", "does not hold one padded token", "takes 4"],
    );
    let alone = plan(&lengths(&[2, 3]), &Options { oversize_alone: true, ..tight }).unwrap();
    assert_eq!((alone.oversize_rows, alone.steps[0].num_micro_batches), (vec![0, 1], 2));
    plan_error(shape(&options(0)), &["max_tokens_per_gpu is 0", "at least 1"]);
}

// Ranks

#[test]
fn too_few_samples_says_how_many_are_missing() {
    plan_error(
        plan(&lengths(&[5, 5]), &Options { dp_size: 4, ..options(10) }),
        &["step 0 has 2 samples", "dp_size 4", "2 missing", "Lower dp_size", "placeholders=True"],
    );
    plan_error(
        plan(&lengths(&[1, 1, 1]), &Options { micro_batch_multiple: 4, ..options(1) }),
        &["1 missing", "micro_batch_multiple"],
    );
    // It is the step that counts: the second one is short.
    let steps =
        Options { dp_size: 2, step_size: StepSize::Rollouts(3), remainder: Remainder::Keep, ..options(1) };
    plan_error(plan(&lengths(&[1, 1, 1, 1]), &steps), &["step 0 has 3 samples", "1 missing"]);
    plan_error(
        plan(&lengths(&[1, 1, 1, 1]), &Options { budget: Budget::Samples(2), ..steps }),
        &["step 1 has 1"],
    );
}

#[test]
fn placeholders_count_in_k_and_in_nothing_else() {
    let plan = plan(&lengths(&[5]), &Options { dp_size: 2, placeholders: true, ..options(10) }).unwrap();
    let expected = Step { num_rollouts: 1, num_prompts: None, num_tokens: 4, num_micro_batches: 1 };
    assert_eq!(plan.steps, [expected]);
    let mut found = micro_batches(&plan);
    found.sort();
    assert_eq!(found, [vec![], vec![0]]);
    assert_eq!(plan.placed.sample_weight, [0.25]);
    assert_eq!(plan.placed.to_batch().unwrap().num_rows(), 1);
}

#[test]
fn k_is_a_multiple_and_nobody_is_empty() {
    let options = Options { micro_batch_multiple: 4, ..options(2) };
    let plan = plan(&lengths(&[1; 6]), &options).unwrap();
    assert_eq!(plan.steps[0].num_micro_batches, 4);
    assert!(micro_batches(&plan).iter().all(|m| !m.is_empty()));
}

#[test]
fn rows_of_a_micro_batch_are_in_input_order() {
    let plan = plan(&lengths(&[2, 9, 1, 5, 3]), &options(100)).unwrap();
    assert_eq!(micro_batches(&plan), [[0, 1, 2, 3, 4]]);
    assert_eq!(plan.placed.total_length, [2, 9, 1, 5, 3]);
}

#[test]
fn fill_and_imbalance() {
    let full = plan(&lengths(&[7, 5, 3, 5]), &options(10)).unwrap();
    assert_eq!((full.fill, full.imbalance), (1.0, 1.0));
    // 6 and 3 on two ranks of 10: 9 tokens in 20; the slowest does 6, the mean 4.5.
    let half = plan(&lengths(&[6, 3]), &Options { dp_size: 2, ..options(10) }).unwrap();
    assert_eq!((half.fill, half.imbalance), (9.0 / 20.0, 6.0 / 4.5));
    // 9 8 5 4 on two ranks that wait at every micro-batch: 9 + 5 of a mean of 13.
    let waiting = Options { dp_size: 2, sync: Sync::MicroBatch, ..options(9) };
    let waits = plan(&lengths(&[9, 8, 5, 4]), &waiting).unwrap();
    assert_eq!((waits.fill, waits.imbalance), (26.0 / 36.0, 14.0 / 13.0));
}

#[test]
fn whole_units_are_on_one_rank() {
    // Rollouts 0 and 1 are of group 0, and 2 and 3 of group 1. Two samples of 4 fit into a micro-batch of 8.
    let summary = grouped(rows(&[(4, 1); 8]), &[0, 1, 2, 3, 0, 1, 2, 3], &[0, 0, 1, 1, 0, 0, 1, 1]);
    let ranks = |keep, dp_size| {
        let plan = plan(&summary, &Options { keep: Some(keep), dp_size, ..options(8) }).unwrap();
        let per_rank = plan.steps[0].num_micro_batches as usize;
        let mut ranks: Vec<Vec<i64>> = micro_batches(&plan).chunks(per_rank).map(<[_]>::concat).collect();
        for rank in &mut ranks {
            rank.sort_unstable();
        }
        ranks.sort();
        ranks
    };
    assert_eq!(ranks(Keep::Groups, 2), [[0, 1, 4, 5], [2, 3, 6, 7]]);
    assert_eq!(ranks(Keep::Rollouts, 4), [[0, 4], [1, 5], [2, 6], [3, 7]]);
    for sync in [Sync::Step, Sync::MicroBatch] {
        // Groups of 4 + 4 + 4 and of 1: three micro-batches of one rank, and the other has only one sample for them.
        let uneven = grouped(rows(&[(4, 1), (4, 1), (4, 1), (1, 0)]), &[0, 1, 2, 3], &[0, 0, 0, 1]);
        let kept = Options { keep: Some(Keep::Groups), dp_size: 2, sync, ..options(4) };
        plan_error(
            plan(&uneven, &kept),
            &["step 0 has 3 micro-batches", "keep_together='group'", "only 1", "placeholders=True"],
        );
        let filled = plan(&uneven, &Options { placeholders: true, ..kept }).unwrap();
        let mut lengths: Vec<usize> = micro_batches(&filled).iter().map(Vec::len).collect();
        lengths.sort_unstable();
        assert_eq!(lengths, [0, 0, 1, 1, 1, 1]);
        // By number of samples, each rank has its own.
        let by_count = plan(&summary, &Options { budget: Budget::Samples(3), ..kept }).unwrap();
        assert_eq!(micro_batches(&by_count).iter().map(Vec::len).collect::<Vec<_>>(), [2; 4]);
    }
    plan_error(
        plan(&summary, &Options { keep: Some(Keep::Groups), dp_size: 4, ..options(8) }),
        &["step 0 has 2 whole groups for dp_size 4", "at least one on each rank", "leave keep_together out"],
    );
    plan_error(
        plan(&lengths(&[3, 3]), &Options { keep: Some(Keep::Groups), ..options(8) }),
        &["keep_together 'group' needs prompt groups", "groups=True"],
    );
    // A group that a boundary cuts is not whole.
    let cut_by = Options { keep: Some(Keep::Groups), step_size: StepSize::Rollouts(3), ..options(8) };
    plan_error(
        plan(&summary, &Options { remainder: Remainder::Keep, ..cut_by }),
        &["group 1", "between steps 0 and 1", "keep_together='group' needs whole groups"],
    );
    assert_eq!(Keep::parse("rollout"), Ok(Keep::Rollouts));
    assert_eq!(Keep::parse("group"), Ok(Keep::Groups));
    plan_error(Keep::parse("prompt"), &["keep_together is 'prompt'", "group, rollout or None"]);
}

#[test]
fn units_are_dealt_so_that_few_micro_batches_are_needed() {
    // Rollouts of one sample of 6 and three times 2 + 2 + 2. Under s * s 36 beside 12 + 12 + 12 is even, and the second
    // rank has 18 tokens, three micro-batches of 6. By tokens it is two on each.
    let summary = grouped(
        rows(&[(6, 1), (2, 1), (2, 1), (2, 1), (2, 1), (2, 1), (2, 1), (2, 1), (2, 1), (2, 1)]),
        &[0, 1, 1, 1, 2, 2, 2, 3, 3, 3],
        &[],
    );
    let quadratic = CostModel::new(0, 1).unwrap();
    let kept = Options { keep: Some(Keep::Rollouts), dp_size: 2, cost: quadratic, ..options(6) };
    assert_eq!(plan(&summary, &kept).unwrap().steps[0].num_micro_batches, 2);
    // Where there is room for it, by cost: the 6 alone beside the others.
    let plan = plan(&summary, &Options { budget: Budget::TokensPerGpu(18), ..kept }).unwrap();
    assert_eq!((micro_batches(&plan)[0].as_slice(), plan.imbalance), (&[0_i64][..], 1.0));
}

// Steps

#[test]
fn a_rollout_is_in_one_step_however_far_apart_its_rows_are() {
    let summary = grouped(rows(&[(2, 1); 6]), &[7, -3, 9, 4, 7, 9], &[]);
    let plan = plan(&summary, &Options { step_size: StepSize::Rollouts(2), ..options(10) }).unwrap();
    assert_eq!(rows_of_steps(&plan, 1), [[0, 1, 4], [2, 3, 5]]);
    assert_eq!(plan.steps.iter().map(|s| s.num_rollouts).collect::<Vec<_>>(), [2, 2]);
}

#[test]
fn the_counts_and_sums_are_those_of_each_step() {
    // Step 0: rollout 0 (2 + 1 tokens) and rollout 1 (3). Step 1: rollout 2 (4), rollout 3 (5 + 0).
    let summary = grouped(
        rows(&[(9, 2), (9, 3), (9, 1), (9, 4), (9, 5), (9, 0)]),
        &[0, 1, 0, 2, 3, 3],
        &[8, 8, 8, 6, 7, 7],
    );
    let per_step = Options { step_size: StepSize::Rollouts(2), ..options(100) };
    let sample = plan(&summary, &per_step).unwrap();
    let step = |rollouts, prompts, tokens| Step {
        num_rollouts: rollouts,
        num_prompts: Some(prompts),
        num_tokens: tokens,
        num_micro_batches: 1,
    };
    assert_eq!(sample.steps, [step(2, 1, 6), step(2, 2, 9)]);
    assert_eq!(sample.placed.rollout_mask_sum, [3, 3, 3, 4, 5, 5]);
    assert_eq!(sample.placed.prompt_mask_sum, None);
    let sixths = [6.0, 6.0, 6.0, 8.0, 10.0, 10.0].map(|x| 1.0 / x);
    assert_eq!(sample.placed.sample_weight, sixths);

    let prompt = plan(&summary, &Options { mode: Mode::PromptMean, ..per_step }).unwrap();
    assert_eq!(prompt.placed.prompt_mask_sum, Some(vec![6, 6, 6, 4, 5, 5].into()));
    assert_eq!(prompt.placed.sample_weight, [6.0, 6.0, 6.0, 8.0, 10.0, 10.0].map(|x| 1.0 / x));

    let token = plan(&summary, &Options { mode: Mode::TokenMean, ..per_step }).unwrap();
    assert_eq!(token.placed.sample_weight, [6.0, 6.0, 6.0, 9.0, 9.0, 9.0].map(|x| 1.0 / x));

    let constant = Options { mode: Mode::Constant, divisor: Some(16.0), ..per_step };
    assert_eq!(plan(&summary, &constant).unwrap().placed.sample_weight, [1.0 / 32.0; 6]);
}

#[test]
fn the_hand_examples_of_the_design() {
    /// The weights of the rows under one mode.
    fn weigh(summary: &Summary, mode: Mode, divisor: Option<f64>) -> Vec<f64> {
        let options = Options { mode, divisor, ..options(1000) };
        plan(summary, &options).unwrap().placed.sample_weight.to_vec()
    }
    let four = grouped(rows(&[(5, 1), (5, 3), (5, 2), (6, 3)]), &[0, 1, 2, 3], &[0, 0, 1, 1]);
    assert_eq!(weigh(&four, Mode::SampleMean, None), [4.0, 12.0, 8.0, 12.0].map(|x| 1.0 / x));
    assert_eq!(weigh(&four, Mode::PromptMean, None), [8.0, 8.0, 10.0, 10.0].map(|x| 1.0 / x));
    assert_eq!(weigh(&four, Mode::TokenMean, None), [1.0 / 9.0; 4]);
    assert_eq!(weigh(&four, Mode::Constant, Some(10.0)), [1.0 / 40.0; 4]);

    let fan_out = grouped(rows(&[(5, 1), (5, 3), (5, 2)]), &[0, 0, 1], &[]);
    assert_eq!(weigh(&fan_out, Mode::SampleMean, None), [8.0, 8.0, 4.0].map(|x| 1.0 / x));

    let groups = [0, 0, 0, 0, 1, 1, 1, 2, 2, 2, 2];
    let uneven = grouped(rows(&[(2, 1); 11]), &(0..11).collect::<Vec<_>>(), &groups);
    let twelfths = groups.map(|g| if g == 1 { 1.0 / 9.0 } else { 1.0 / 12.0 });
    assert_eq!(weigh(&uneven, Mode::PromptMean, None), twelfths);
    assert_eq!(weigh(&uneven, Mode::SampleMean, None), [1.0 / 11.0; 11]);
}

#[test]
fn what_is_empty_counts_or_is_skipped() {
    let summary = grouped(rows(&[(9, 2), (9, 0), (9, 1), (9, 0)]), &[0, 1, 2, 3], &[0, 0, 1, 2]);
    let totals = |mode, count_empty| {
        let plan = plan(&summary, &Options { mode, count_empty, ..options(100) }).unwrap();
        let step = plan.steps[0];
        ((step.num_rollouts, step.num_prompts, step.num_tokens), plan.placed.sample_weight.to_vec())
    };
    let (counted, skipped) = ((4, Some(3), 3), (2, Some(2), 3));
    assert_eq!(totals(Mode::SampleMean, true), (counted, vec![1.0 / 8.0, 0.0, 1.0 / 4.0, 0.0]));
    assert_eq!(totals(Mode::SampleMean, false), (skipped, vec![1.0 / 4.0, 0.0, 1.0 / 2.0, 0.0]));
    assert_eq!(totals(Mode::PromptMean, true), (counted, vec![1.0 / 6.0, 1.0 / 6.0, 1.0 / 3.0, 0.0]));
    assert_eq!(totals(Mode::PromptMean, false), (skipped, vec![1.0 / 4.0, 1.0 / 4.0, 1.0 / 2.0, 0.0]));
    // A token is a token either way.
    assert_eq!(totals(Mode::TokenMean, false).1, [1.0 / 3.0; 4]);
}

#[test]
fn rows_without_ids_are_rollouts_that_count_or_are_skipped() {
    let summary = rows(&[(9, 2), (9, 0), (9, 1)]);
    for (count_empty, num_rollouts, weights) in
        [(true, 3, [1.0 / 6.0, 0.0, 1.0 / 3.0]), (false, 2, [1.0 / 4.0, 0.0, 1.0 / 2.0])]
    {
        let plan = plan(&summary, &Options { count_empty, ..options(100) }).unwrap();
        assert_eq!(plan.steps[0].num_rollouts, num_rollouts);
        assert_eq!(plan.placed.sample_weight, weights);
    }
}

#[test]
fn a_rollout_is_empty_only_if_all_its_samples_are() {
    let summary = grouped(rows(&[(9, 0), (9, 3), (9, 0)]), &[5, 5, 6], &[]);
    let plan = plan(&summary, &Options { count_empty: false, ..options(100) }).unwrap();
    assert_eq!(plan.steps[0].num_rollouts, 1);
    assert_eq!(plan.placed.sample_weight, [1.0 / 3.0, 1.0 / 3.0, 0.0]);
}

#[test]
fn skipping_moves_no_step_boundary() {
    let summary = grouped(rows(&[(9, 0), (9, 1), (9, 0), (9, 0), (9, 1)]), &[0, 1, 2, 3, 4], &[]);
    for count_empty in [true, false] {
        let options = Options {
            count_empty,
            step_size: StepSize::Rollouts(2),
            remainder: Remainder::Keep,
            ..options(100)
        };
        let plan = plan(&summary, &options).unwrap();
        assert_eq!(rows_of_steps(&plan, 1), [vec![0, 1], vec![2, 3], vec![4]]);
        let counts: Vec<i64> = plan.steps.iter().map(|s| s.num_rollouts).collect();
        assert_eq!(counts, if count_empty { [2, 2, 1] } else { [1, 0, 1] });
        assert!(plan.placed.sample_weight.iter().all(|w| w.is_finite()));
    }
}

#[test]
fn a_step_without_a_trained_token_weighs_nothing() {
    let summary = grouped(rows(&[(3, 0), (4, 0)]), &[0, 1], &[0, 1]);
    for (mode, divisor) in [
        (Mode::SampleMean, None),
        (Mode::PromptMean, None),
        (Mode::TokenMean, None),
        (Mode::Constant, Some(2.0)),
    ] {
        for count_empty in [true, false] {
            let plan = plan(&summary, &Options { mode, divisor, count_empty, ..options(100) }).unwrap();
            assert_eq!(plan.steps[0].num_tokens, 0);
            assert!(plan.placed.sample_weight.iter().all(|w| w.is_finite()));
            let zero = mode != Mode::Constant || !count_empty;
            assert!(!zero || plan.placed.sample_weight == [0.0, 0.0]);
        }
    }
}

#[test]
fn what_is_dropped_is_listed_and_counts_nowhere() {
    let summary = grouped(rows(&[(3, 2); 6]), &[0, 1, 2, 0, 2, 1], &[0, 0, 1, 0, 1, 0]);
    let options = Options {
        mode: Mode::PromptMean,
        step_size: StepSize::Prompts(1),
        remainder: Remainder::Error,
        ..options(100)
    };
    assert!(plan(&summary, &options).unwrap().dropped_rows.is_empty());
    let two = Options { step_size: StepSize::Rollouts(2), remainder: Remainder::Drop, ..options };
    let plan_of_two = plan(&summary, &two).unwrap();
    assert_eq!(plan_of_two.dropped_rows, [2, 4]);
    assert_eq!(rows_of_steps(&plan_of_two, 1), [[0, 1, 3, 5]]);
    assert_eq!(plan_of_two.steps[0].num_prompts, Some(1));
    assert_eq!(plan_of_two.placed.sample_weight, [1.0 / 8.0; 4]);
    plan_error(
        plan(&summary, &Options { remainder: Remainder::Error, ..two }),
        &["3 rollouts", "global_batch_size 2", "1 left over"],
    );
}

#[test]
fn a_dropped_row_may_be_over_the_budget() {
    let drop = Options { step_size: StepSize::Rollouts(2), remainder: Remainder::Drop, ..options(10) };
    let plan = plan(&lengths(&[3, 3, 99]), &drop).unwrap();
    assert_eq!((plan.dropped_rows, plan.oversize_rows), (vec![2], vec![]));
}

#[test]
fn a_group_that_a_boundary_cuts_is_named() {
    let summary = grouped(rows(&[(3, 2); 4]), &[0, 1, 2, 3], &[70, 71, 71, 72]);
    let options = Options { step_size: StepSize::Rollouts(2), ..options(100) };
    plan_error(
        plan(&summary, &Options { mode: Mode::PromptMean, ..options }),
        &["group 71", "between steps 0 and 1", "prompts_per_step="],
    );
    // The other modes may cut it, and P counts the group in both steps.
    let sample = plan(&summary, &options).unwrap();
    assert_eq!(sample.steps.iter().map(|s| s.num_prompts).collect::<Vec<_>>(), [Some(2), Some(2)]);
    let names = Summary { group: vec![common::ids("group_index", &[1, 1, 1, 1])], ..summary };
    plan_error(plan(&names, &Options { mode: Mode::PromptMean, ..options }), &["group 1 between"]);
}

#[test]
fn prompts_need_groups() {
    let summary = lengths(&[3, 3]);
    plan_error(
        plan(&summary, &Options { mode: Mode::PromptMean, ..options(10) }),
        &["'prompt_mean'", "groups=True"],
    );
    let per_prompt = Options { step_size: StepSize::Prompts(1), ..options(10) };
    plan_error(plan(&summary, &per_prompt), &["prompts_per_step needs groups", "groups=True"]);
}

// Arguments and odd summaries

#[test]
fn arguments_out_of_range_are_refused() {
    for bad in [0, -1, i64::MIN, i64::MAX] {
        let text = format!("is {bad}");
        plan_error(shape(&Options { dp_size: bad, ..options(9) }), &["dp_size", &text]);
        plan_error(
            shape(&Options { micro_batch_multiple: bad, ..options(9) }),
            &["micro_batch_multiple", &text],
        );
        plan_error(
            shape(&Options { budget: Budget::Samples(bad), ..options(9) }),
            &["micro_batch_size", &text],
        );
    }
    plan_error(shape(&options(-5)), &["max_tokens_per_gpu is -5"]);
    assert!(shape(&options(i64::MAX)).is_ok());
    plan_error(shape(&Options { mode: Mode::Constant, ..options(9) }), &["needs divisor="]);
    plan_error(shape(&Options { divisor: Some(2.0), ..options(9) }), &["only loss_aggregation 'constant'"]);
}

#[test]
fn more_tokens_than_positions_hold_are_refused() {
    let long = i64::from(i32::MAX) - 5;
    let by_count = Options { budget: Budget::Samples(2), ..options(1) };
    plan_error(plan(&rows(&[(long, 1), (long, 1)]), &by_count), &["positions are int32", "smaller"]);
    let alone = Options { oversize_alone: true, ..options(10) };
    plan_error(plan(&rows(&[(i64::MAX, 1)]), &alone), &["positions are int32"]);
    assert!(plan(&rows(&[(long, 1)]), &alone).is_ok());
}

#[test]
fn a_summary_without_rows_is_refused() {
    for step_size in [StepSize::Whole, StepSize::Rollouts(1)] {
        for placeholders in [false, true] {
            let options = Options { step_size, placeholders, remainder: Remainder::Keep, ..options(10) };
            says(plan(&rows(&[]), &options), &["no rows"]);
        }
    }
}

#[test]
fn a_summary_whose_rollouts_lie_in_two_groups_is_refused() {
    let summary = grouped(rows(&[(3, 2); 3]), &[1, 2, 1], &[5, 5, 6]);
    says(plan(&summary, &options(10)), &["group_index", "row 2", "rollout_id 1", "group 6", "row 0"]);
}

#[test]
fn rows_keep_the_numbers_of_the_summary() {
    let summary = Summary { row: vec![10, 20, 30].into(), ..lengths(&[3, 15, 3]) };
    let plan = plan(&summary, &Options { oversize_alone: true, ..options(6) }).unwrap();
    let mut found = plan.placed.row.to_vec();
    found.sort_unstable();
    assert_eq!((found, plan.oversize_rows), (vec![10, 20, 30], vec![20]));
}

#[test]
fn a_plan_as_arrow() {
    let summary = grouped(rows(&[(7, 1), (5, 2), (3, 1), (5, 3)]), &[0, 1, 2, 3], &[0, 0, 1, 1]);
    let by_prompt =
        Options { mode: Mode::PromptMean, step_size: StepSize::Prompts(1), dp_size: 2, ..options(10) };
    let planned = plan(&summary, &by_prompt).unwrap();
    let batch = planned.placed.to_batch().unwrap();
    let names: Vec<_> = batch.schema().fields().iter().map(|f| f.name().clone()).collect();
    let expected = [
        "row",
        "total_length",
        "mask_sum",
        "rollout_mask_sum",
        "prompt_mask_sum",
        "sample_weight",
        "response_length",
        "rollout_index",
        "prompt_index",
    ];
    assert_eq!(names, expected);
    let column =
        |name: &str| batch.column_by_name(name).unwrap().as_primitive::<Int64Type>().values().to_vec();
    assert_eq!(planned.offsets, [0, 1, 2, 3, 4]); // step 0 on ranks 0 and 1, then step 1
    assert_eq!(column("row"), [0, 1, 3, 2]); // the heaviest to rank 0
    assert_eq!(column("total_length"), [7, 5, 5, 3]);
    assert_eq!(column("mask_sum"), [1, 2, 3, 1]);
    assert_eq!(column("prompt_mask_sum"), [3, 3, 4, 4]);
    assert_eq!(column("rollout_index"), [0, 1, 3, 2]);
    assert_eq!(column("prompt_index"), [0, 0, 1, 1]);
    let weights = batch.column_by_name("sample_weight").unwrap().as_primitive::<Float64Type>();
    assert_eq!(weights.values().to_vec(), [1.0 / 3.0, 1.0 / 3.0, 1.0 / 4.0, 1.0 / 4.0]);

    let together = plan(&summary, &options(100)).unwrap().placed.to_batch().unwrap();
    assert!(together.column_by_name("prompt_mask_sum").is_none());
}

#[test]
fn from_arrow_to_weights() {
    // The third example of the design through summarize and plan.
    let data = common::batch(vec![
        ("tokens", lists(&[&[1, 2], &[1, 2, 3, 4], &[1, 2, 3], &[1, 2, 3, 4, 5, 6, 7]])),
        ("loss_mask", lists(&[&[1], &[1, 1, 1], &[1, 1], &[1; 6]])),
        ("rollout_id", int64(&[0, 1, 2, 3])),
        ("group_index", int64(&[0, 0, 1, 1])),
    ]);
    let summary = read(&[data], &common::with_groups()).unwrap();
    let plan = plan(&summary, &Options { mode: Mode::PromptMean, ..options(100) }).unwrap();
    let weights = weights(&plan);
    let loss = 10.0 * weights[&0] + 6.0 * weights[&1] + 8.0 * weights[&2] + 6.0 * weights[&3];
    assert!((loss - 23.0 / 8.0).abs() < 1e-14);
}

// For all input

#[derive(Debug, Clone)]
struct Case {
    /// total length, mask sum
    samples: Vec<(i64, i64)>,
    rollouts: Option<Vec<i64>>,
    groups: Option<Vec<i64>>,
    options: Options,
    pads: (i64, i64),
}

/// Samples, rollouts, groups, whether there are rollout ids, whether there are groups.
type Drawn = (Vec<(i64, i64)>, Vec<i64>, Vec<i64>, bool, bool);

fn samples_and_ids() -> impl Strategy<Value = Drawn> {
    let sample = (1..40_i64).prop_flat_map(|total| (Just(total), prop_oneof![3 => 0..total, 1 => Just(0)]));
    (
        prop::collection::vec((sample, 0..24_usize), 1..40),
        prop::collection::vec(0..6_i64, 24),
        any::<bool>(),
        any::<bool>(),
        any::<bool>(),
    )
        .prop_map(|(drawn, group_of, neighbours, keyed, has_groups)| {
            let samples = drawn.iter().map(|(s, _)| *s).collect();
            let rollout = |(i, (_, r)): (usize, &((i64, i64), usize))| {
                if neighbours { (i / 2) as i64 } else { *r as i64 }
            };
            let rollouts: Vec<i64> = drawn.iter().enumerate().map(rollout).collect();
            // Groups of neighbouring rollouts, or scattered ones.
            let group = |r: &i64| if neighbours { r / 2 } else { group_of[*r as usize] };
            let groups = rollouts.iter().map(group).collect();
            (samples, rollouts, groups, keyed, has_groups)
        })
}

fn case() -> impl Strategy<Value = Case> {
    let budget = prop_oneof![
        3 => (1..80_i64).prop_map(Budget::TokensPerGpu),
        1 => (1..7_i64).prop_map(Budget::Samples)
    ];
    let step_size = prop_oneof![
        2 => Just(StepSize::Whole),
        2 => (1..8_usize).prop_map(StepSize::Rollouts),
        1 => (1..4_usize).prop_map(StepSize::Prompts)
    ];
    let remainder =
        prop_oneof![1 => Just(Remainder::Error), 2 => Just(Remainder::Drop), 3 => Just(Remainder::Keep)];
    let keep = prop_oneof![3 => Just(None), 1 => Just(Some(Keep::Rollouts)), 1 => Just(Some(Keep::Groups))];
    let mode =
        prop::sample::select(vec![Mode::SampleMean, Mode::PromptMean, Mode::TokenMean, Mode::Constant]);
    (
        samples_and_ids(),
        (mode, 0.1..100.0_f64, budget, step_size, remainder),
        (1..5_i64, 1..5_i64, any::<bool>(), 1..6_i64, 1..20_i64),
        (any::<bool>(), any::<bool>(), any::<bool>(), 1..4_i64, any::<bool>(), any::<bool>(), keep),
    )
        .prop_map(|(data, meaning, sizes, flags)| {
            let (samples, rollouts, groups, keyed, has_groups) = data;
            let (mode, divisor, budget, step_size, remainder) = meaning;
            let (dp_size, cp_size, zigzag, pad, pad_micro_batch) = sizes;
            let (count_empty, oversize_alone, placeholders, micro_batch_multiple, attention, waits, keep) =
                flags;
            let layout = if zigzag { Layout::Zigzag } else { Layout::Contiguous };
            Case {
                samples,
                rollouts: (keyed || has_groups).then_some(rollouts),
                groups: has_groups.then_some(groups),
                options: Options {
                    mode,
                    divisor: (mode == Mode::Constant).then_some(divisor),
                    count_empty,
                    budget,
                    dp_size,
                    cut: Cut::new(cp_size, layout, pad, pad_micro_batch).unwrap(),
                    step_size,
                    remainder,
                    oversize_alone,
                    placeholders,
                    micro_batch_multiple,
                    cost: if attention { CostModel::ATTENTION } else { CostModel::TOKENS },
                    sync: if waits { Sync::MicroBatch } else { Sync::Step },
                    keep,
                },
                pads: (pad, pad_micro_batch),
            }
        })
}

/// What the data and the arguments alone say, worked out without the code under test.
struct Expected {
    /// Rows of each step.
    steps: Vec<BTreeSet<usize>>,
    dropped: BTreeSet<usize>,
    refused: bool,
}

impl Case {
    fn summary(&self) -> Summary {
        let summary = rows(&self.samples);
        match (&self.rollouts, &self.groups) {
            (Some(rollouts), groups) => grouped(summary, rollouts, groups.as_deref().unwrap_or_default()),
            _ => summary,
        }
    }

    fn rollout(&self, row: usize) -> i64 {
        self.rollouts.as_ref().map_or(row as i64, |r| r[row])
    }

    fn expected(&self) -> Expected {
        let all = 0..self.samples.len();
        let group = |row: usize| self.groups.as_ref().map_or(0, |g| g[row]);
        let (size, unit): (usize, Vec<i64>) = match self.options.step_size {
            StepSize::Whole => (usize::MAX, vec![0; all.len()]),
            StepSize::Rollouts(n) => (n, all.clone().map(|row| self.rollout(row)).collect()),
            StepSize::Prompts(n) => (n, all.clone().map(group).collect()),
        };
        let mut seen = Vec::new();
        for id in &unit {
            if !seen.contains(id) {
                seen.push(*id);
            }
        }
        let whole = self.options.step_size == StepSize::Whole;
        let incomplete = !whole && seen.len() % size != 0;
        let mut steps: Vec<BTreeSet<usize>> = seen
            .chunks(size)
            .map(|ids| all.clone().filter(|row| ids.contains(&unit[*row])).collect())
            .collect();
        let whole_groups = self.options.mode == Mode::PromptMean || self.options.keep == Some(Keep::Groups);
        let cut_group = steps.iter().enumerate().any(|(i, a)| {
            steps[..i].iter().any(|b| a.iter().any(|x| b.iter().any(|y| group(*x) == group(*y))))
        });
        let needs_groups = whole_groups || matches!(self.options.step_size, StepSize::Prompts(_));
        let mut refused = (needs_groups && self.groups.is_none()) || (whole_groups && cut_group);
        let mut dropped = BTreeSet::new();
        if incomplete {
            match self.options.remainder {
                Remainder::Error => refused = true,
                Remainder::Keep => {}
                Remainder::Drop => {
                    dropped = steps.pop().unwrap();
                    refused |= steps.is_empty();
                }
            }
        }
        let scheduled = || steps.iter().flatten();
        let fits = |row: &usize| self.budget().is_none_or(|budget| self.padded_total(&[*row]) <= budget);
        refused |= !self.options.oversize_alone && !scheduled().all(fits);
        Expected { steps, dropped, refused }
    }

    fn budget(&self) -> Option<i64> {
        match self.options.budget {
            Budget::TokensPerGpu(n) => Some(n * self.options.cut.cp_size),
            Budget::Samples(_) => None,
        }
    }

    /// The padded tokens of a micro-batch of these rows, from the design's words.
    fn padded_total(&self, rows: &[usize]) -> i64 {
        let (cp_size, zigzag) = (self.options.cut.cp_size, self.options.cut.layout == Layout::Zigzag);
        let chunks = if cp_size > 1 && zigzag { 2 * cp_size } else { 1 };
        let whole = if zigzag { chunks } else { cp_size };
        let sequences: i64 = rows.iter().map(|r| up(self.samples[*r].0, lcm(chunks, self.pads.0))).sum();
        up(sequences, lcm(whole, self.pads.1))
    }

    /// The weight of a row of a step, in float64.
    fn weight(&self, row: usize, step: &BTreeSet<usize>) -> f64 {
        let tokens = |member: &dyn Fn(usize) -> bool| -> i64 {
            step.iter().filter(|r| member(**r)).map(|r| self.samples[*r].1).sum()
        };
        let units = |unit: &dyn Fn(usize) -> i64| {
            let ids: BTreeSet<i64> = step.iter().map(|r| unit(*r)).collect();
            let counts = |id: &&i64| self.options.count_empty || tokens(&|r| unit(r) == **id) > 0;
            ids.iter().filter(counts).count() as f64
        };
        let rollout = |r: usize| self.rollout(r);
        let group = |r: usize| self.groups.as_ref().map_or(0, |g| g[r]);
        let denominator = match self.options.mode {
            Mode::SampleMean => units(&rollout) * tokens(&|r| rollout(r) == rollout(row)) as f64,
            Mode::PromptMean => units(&group) * tokens(&|r| group(r) == group(row)) as f64,
            Mode::TokenMean => tokens(&|_| true) as f64,
            Mode::Constant => units(&rollout) * self.options.divisor.unwrap(),
            Mode::TokenMeanLegacy => unreachable!("it depends on the cut"),
        };
        if denominator == 0.0 { 0.0 } else { 1.0 / denominator }
    }
}

proptest! {
    #![proptest_config(cases(1000))]

    #[test]
    fn a_plan_keeps_every_rule(case in case()) {
        let expected = case.expected();
        let options = &case.options;
        let plan = match plan(&case.summary(), options) {
            Ok(found) => {
                prop_assert!(!expected.refused, "planned, and should have been refused");
                found
            }
            Err(error) => {
                prop_assert!(matches!(error, rollpack_core::Error::Plan(_)), "{:?}", error);
                let tight = error.to_string().contains("does not hold one padded token");
                let missing = [" missing. Lower", "needs at least one on each rank", "has only"];
                let missing = missing.iter().any(|text| error.to_string().contains(text)) && !options.placeholders;
                prop_assert!(expected.refused || tight || missing, "{}", error);
                return Ok(());
            }
        };
        let again = self::plan(&case.summary(), options).unwrap();
        prop_assert_eq!(format!("{plan:?}"), format!("{again:?}"));

        // Every row once, in the step of its unit, or dropped.
        let steps: Vec<BTreeSet<usize>> = rows_of_steps(&plan, options.dp_size)
            .into_iter()
            .map(|rows| {
                let set: BTreeSet<usize> = rows.iter().map(|r| *r as usize).collect();
                assert_eq!(set.len(), rows.len(), "a row is placed twice");
                set
            })
            .collect();
        prop_assert_eq!(&steps, &expected.steps);
        let dropped: Vec<usize> = plan.dropped_rows.iter().map(|r| *r as usize).collect();
        prop_assert_eq!(dropped, expected.dropped.into_iter().collect::<Vec<_>>());

        // The same K on each rank is how micro-batches are stored; it is a multiple.
        for step in &plan.steps {
            prop_assert!(step.num_micro_batches >= 1);
            prop_assert_eq!(step.num_micro_batches % options.micro_batch_multiple, 0);
        }

        // Budgets, counts, order.
        let mut oversize = BTreeSet::new();
        for members in micro_batches(&plan) {
            prop_assert!(members.is_sorted());
            prop_assert!(options.placeholders || !members.is_empty());
            let members: Vec<usize> = members.iter().map(|r| *r as usize).collect();
            match options.budget {
                Budget::Samples(n) => prop_assert!(members.len() as i64 <= n),
                Budget::TokensPerGpu(_) => {
                    if !members.is_empty() && case.padded_total(&members) > case.budget().unwrap() {
                        prop_assert!(members.len() == 1 && options.oversize_alone);
                        oversize.insert(members[0] as i64);
                    }
                }
            }
        }
        prop_assert_eq!(plan.oversize_rows.iter().copied().collect::<BTreeSet<_>>(), oversize);
        prop_assert_eq!(plan.oversize_rows.iter().collect::<BTreeSet<_>>().len(), plan.oversize_rows.len());

        // A unit that is kept together is on one rank of each step.
        let mut bounds = plan.offsets.windows(2);
        for step in &plan.steps {
            let mut rank_of = BTreeMap::new();
            for slot in 0..step.num_micro_batches * options.dp_size {
                let Some(&[from, to]) = bounds.next() else { panic!("too few micro-batches") };
                for row in &plan.placed.row[from as usize..to as usize] {
                    let unit = match options.keep {
                        None => break,
                        Some(Keep::Rollouts) => case.rollout(*row as usize),
                        Some(Keep::Groups) => case.groups.as_ref().unwrap()[*row as usize],
                    };
                    let rank = slot / step.num_micro_batches;
                    prop_assert_eq!(*rank_of.entry(unit).or_insert(rank), rank);
                }
            }
        }

        // What is said of each row.
        let mut step_of = BTreeMap::new();
        for step in &steps {
            step_of.extend(step.iter().map(|row| (*row, step)));
        }
        for (at, row) in plan.placed.row.iter().enumerate() {
            let row = *row as usize;
            let (total, sum) = case.samples[row];
            prop_assert_eq!((plan.placed.total_length[at], plan.placed.mask_sum[at]), (total, sum));
            let wanted = case.weight(row, step_of[&row]);
            let found = plan.placed.sample_weight[at];
            prop_assert!((found - wanted).abs() <= 4.0 * f64::EPSILON * wanted, "{} is not {}", found, wanted);
        }
        for (step, rows) in plan.steps.iter().zip(&steps) {
            let tokens: i64 = rows.iter().map(|r| case.samples[*r].1).sum();
            prop_assert_eq!(step.num_tokens, tokens);
            prop_assert_eq!(step.num_prompts.is_some(), case.groups.is_some());
        }
        prop_assert_eq!(plan.placed.prompt_mask_sum.is_some(), options.mode == Mode::PromptMean);
        prop_assert!(plan.fill > 0.0 && plan.fill <= 1.0);
        prop_assert!(plan.imbalance >= 1.0 - 1e-12);
    }
}

/// Micro-batches of 4, 1 and no trained tokens: the mean is over the two that have some.
#[test]
fn token_mean_legacy_counts_micro_batches_with_trained_tokens() {
    let legacy = Options { mode: Mode::TokenMeanLegacy, ..options(10) };
    let made = plan(&rows(&[(10, 4), (10, 1), (10, 0)]), &legacy).unwrap();
    assert_eq!(made.steps[0].num_micro_batches, 3);
    assert_eq!(weights(&made), BTreeMap::from([(0, 1.0 / 8.0), (1, 1.0 / 2.0), (2, 0.0)]));
    // Two samples in one micro-batch share its tokens.
    let made = plan(&rows(&[(5, 4), (5, 1)]), &legacy).unwrap();
    assert_eq!(weights(&made), BTreeMap::from([(0, 1.0 / 5.0), (1, 1.0 / 5.0)]));
}
