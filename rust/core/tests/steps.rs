//! Which samples make up a step.
#![allow(clippy::unwrap_used)] // a test that cannot go on has failed

mod common;

use common::{cases, plan_error};
use proptest::prelude::*;
use rollpack_core::steps::{Remainder, StepSize, Steps, steps};

fn cut(
    rollouts: &[usize],
    groups: Option<&[usize]>,
    size: StepSize,
    remainder: Remainder,
) -> rollpack_core::Result<Steps> {
    steps(rollouts, groups, size, remainder, None, |_| String::new())
}

/// As under `prompt_mean`: groups have to be whole.
fn cut_whole(rollouts: &[usize], groups: &[usize], size: StepSize) -> rollpack_core::Result<Steps> {
    steps(rollouts, Some(groups), size, Remainder::Keep, Some("prompt_mean"), |i| {
        format!("the group of sample {i}")
    })
}

#[test]
fn without_a_size_there_is_one_step() {
    let whole = cut(&[0, 1, 0, 2], None, StepSize::Whole, Remainder::Error).unwrap();
    assert_eq!(whole, Steps { samples: vec![vec![0, 1, 2, 3]], dropped: vec![] });
}

#[test]
fn all_samples_of_a_rollout_are_in_one_step_however_far_apart() {
    let two = cut(&[0, 1, 2, 3, 0, 2], None, StepSize::Rollouts(2), Remainder::Error).unwrap();
    assert_eq!(two.samples, [vec![0, 1, 4], vec![2, 3, 5]]);
    let one = cut(&[0, 1, 1, 0], None, StepSize::Rollouts(1), Remainder::Error).unwrap();
    assert_eq!(one.samples, [vec![0, 3], vec![1, 2]]);
}

#[test]
fn prompts_per_step_counts_groups_and_not_rows() {
    // Groups of 3, 1 and 2 rollouts, and one that fans out.
    let rollouts = [0, 1, 2, 3, 4, 5, 6, 6];
    let groups = [0, 0, 0, 1, 2, 2, 3, 3];
    let two = cut(&rollouts, Some(&groups), StepSize::Prompts(2), Remainder::Error).unwrap();
    assert_eq!(two.samples, [vec![0, 1, 2, 3], vec![4, 5, 6, 7]]);
    let without = cut(&rollouts, None, StepSize::Prompts(2), Remainder::Error);
    plan_error(without, &["prompts_per_step needs groups", "groups=True"]);
}

#[test]
fn an_incomplete_last_step() {
    let rollouts = [0, 1, 2, 3, 4, 1];
    let two = |remainder| cut(&rollouts, None, StepSize::Rollouts(2), remainder);
    plan_error(
        two(Remainder::Error),
        &["5 rollouts", "global_batch_size 2", "1 left over", "remainder='drop'", "remainder='keep'"],
    );
    let dropped = two(Remainder::Drop).unwrap();
    assert_eq!(dropped, Steps { samples: vec![vec![0, 1, 5], vec![2, 3]], dropped: vec![4] });
    let kept = two(Remainder::Keep).unwrap();
    assert_eq!(kept, Steps { samples: vec![vec![0, 1, 5], vec![2, 3], vec![4]], dropped: vec![] });

    let prompts = |remainder| cut(&[0, 1, 2], Some(&[0, 0, 1]), StepSize::Prompts(4), remainder);
    plan_error(prompts(Remainder::Error), &["2 prompt groups", "prompts_per_step 4", "2 left over"]);
    assert_eq!(prompts(Remainder::Keep).unwrap().samples, [vec![0, 1, 2]]);
}

#[test]
fn dropping_everything_is_an_error() {
    let result = cut(&[0, 1, 2], None, StepSize::Rollouts(4), Remainder::Drop);
    plan_error(result, &["3 rollouts", "global_batch_size 4", "leaves nothing", "remainder='keep'"]);
}

#[test]
fn a_complete_last_step_needs_no_remainder() {
    for remainder in [Remainder::Error, Remainder::Drop, Remainder::Keep] {
        let cut = cut(&[0, 1, 2, 3], None, StepSize::Rollouts(2), remainder).unwrap();
        assert_eq!(cut, Steps { samples: vec![vec![0, 1], vec![2, 3]], dropped: vec![] });
    }
}

#[test]
fn a_group_that_a_boundary_cuts_is_named() {
    let (rollouts, groups) = ([0, 1, 2, 3], [0, 1, 1, 2]);
    plan_error(
        cut_whole(&rollouts, &groups, StepSize::Rollouts(2)),
        &["global_batch_size 2 cuts the group of sample 2", "steps 0 and 1", "prompts_per_step="],
    );
    // Groups that a boundary leaves whole are fine, and so is one that is scattered inside a step.
    assert!(cut_whole(&[0, 1, 2, 3], &[0, 0, 1, 1], StepSize::Rollouts(2)).is_ok());
    assert!(cut_whole(&[0, 1, 2, 3], &[0, 1, 0, 1], StepSize::Rollouts(4)).is_ok());
    assert!(cut_whole(&[0, 1, 2, 3], &[0, 1, 0, 1], StepSize::Prompts(1)).is_ok());
    // Where groups do not matter to the mode, they may be cut.
    assert!(cut(&rollouts, Some(&groups), StepSize::Rollouts(2), Remainder::Error).is_ok());
}

#[test]
fn a_step_of_nothing_is_refused() {
    plan_error(
        cut(&[0], None, StepSize::Rollouts(0), Remainder::Keep),
        &["global_batch_size is 0", "at least 1"],
    );
    plan_error(cut(&[0], Some(&[0]), StepSize::Prompts(0), Remainder::Keep), &["prompts_per_step is 0"]);
}

#[test]
fn remainder_has_three_names() {
    assert_eq!(Remainder::parse("error"), Ok(Remainder::Error));
    assert_eq!(Remainder::parse("drop"), Ok(Remainder::Drop));
    assert_eq!(Remainder::parse("keep"), Ok(Remainder::Keep));
    plan_error(Remainder::parse("pad"), &["'pad'", "error, drop or keep"]);
}

/// Numbers in first-seen order.
fn first_seen(ids: &[u8]) -> Vec<usize> {
    let mut seen: Vec<u8> = Vec::new();
    let number = |id: &u8| {
        seen.iter().position(|s| s == id).unwrap_or_else(|| {
            seen.push(*id);
            seen.len() - 1
        })
    };
    ids.iter().map(number).collect()
}

proptest! {
    #![proptest_config(cases(200))]

    #[test]
    fn every_sample_is_in_the_step_of_its_unit(
        ids in prop::collection::vec(0..20_u8, 1..60),
        size in 1..8_usize,
        keep in any::<bool>(),
    ) {
        let rollouts = first_seen(&ids);
        let units = rollouts.iter().max().unwrap() + 1;
        let remainder = if keep { Remainder::Keep } else { Remainder::Drop };
        let cut = cut(&rollouts, None, StepSize::Rollouts(size), remainder);
        if !keep && units < size {
            prop_assert!(cut.is_err());
            return Ok(());
        }
        let cut = cut.unwrap();
        let steps = if keep { units.div_ceil(size) } else { units / size };
        prop_assert_eq!(cut.samples.len(), steps);
        for (sample, rollout) in rollouts.iter().enumerate() {
            match cut.samples.get(rollout / size) {
                Some(step) => prop_assert!(step.contains(&sample)),
                None => prop_assert!(cut.dropped.contains(&sample)),
            }
        }
        let mut placed = cut.samples.concat();
        placed.extend(&cut.dropped);
        placed.sort_unstable();
        prop_assert_eq!(placed, (0..rollouts.len()).collect::<Vec<_>>());
        prop_assert!(cut.samples.iter().all(|s| s.is_sorted() && !s.is_empty()));
    }
}
