//! Micro-batches of a step that is still arriving: full ones, and the rules of a plan.
#![allow(clippy::unwrap_used, clippy::panic)] // a test that cannot go on has failed

mod common;

use common::{cases, cut, options, plan_error, up};
use proptest::prelude::*;
use rollpack_core::cost::CostModel;
use rollpack_core::cut::Layout;
use rollpack_core::online::{Online, Round};
use rollpack_core::options::{Budget, Options};

/// The rounds of a step whose samples of these lengths come in parts of so many.
fn rounds(
    lengths: &[i64],
    parts: usize,
    options: Options,
    look_ahead: i64,
) -> rollpack_core::Result<Vec<Round>> {
    let mut online = Online::new(options, look_ahead)?;
    let rows: Vec<i64> = (0..lengths.len() as i64).collect();
    let mut rounds = Vec::new();
    for (rows, lengths) in rows.chunks(parts).zip(lengths.chunks(parts)) {
        rounds.extend(online.add(rows, lengths)?);
    }
    rounds.push(online.finish(0)?);
    Ok(rounds)
}

#[test]
fn a_micro_batch_goes_out_when_one_more_would_be_full() {
    let mut online = Online::new(options(10), 1).unwrap();
    assert!(online.add(&[0, 1, 2, 3], &[7, 5, 3, 4]).unwrap().is_empty()); // 19 tokens: not yet two micro-batches
    // The oldest sample goes, and the 3 fills it up; the rest waits.
    assert_eq!(online.add(&[4], &[1]).unwrap(), [vec![vec![vec![0, 2]]]]);
    assert_eq!(online.finish(0).unwrap(), [[[1, 3, 4]]]);
    // The next step counts from 0 again.
    online.add(&[5], &[2]).unwrap();
    assert_eq!(online.finish(1).unwrap(), [[[0]]]);
}

#[test]
fn the_oldest_goes_first_even_if_nothing_fits_beside_it() {
    // 6 + 3 leaves room, 7 + 3 does not: and still the 6 does not wait.
    let all = rounds(&[6, 7, 3, 7], 1, options(10), 1).unwrap();
    assert_eq!(all, [vec![vec![vec![0, 2]]], vec![vec![vec![1], vec![3]]]]);
}

#[test]
fn ranks_get_the_same_number_and_are_evened_out_over_the_step() {
    let two = Options { dp_size: 2, ..options(10) };
    // The 9 and the 6 go out when two rounds of two would be full. The rest is 10 + 5 and 9 + 8, and the rank that was
    // given less gets more: 9 + 10 + 5 on one, 6 + 9 + 8 on the other.
    let all = rounds(&[9, 6, 8, 9, 5, 10], 1, two, 1).unwrap();
    assert_eq!(
        all,
        [vec![vec![vec![0]], vec![vec![1]]], vec![vec![vec![5], vec![4]], vec![vec![3], vec![2]]]]
    );
}

#[test]
fn what_is_over_the_budget_is_refused_or_alone() {
    plan_error(rounds(&[3, 11], 1, options(10), 1), &["row 1", "11 tokens", "oversize='alone'"]);
    let alone = Options { oversize_alone: true, ..options(10) };
    assert_eq!(rounds(&[15, 3, 3], 3, alone, 1).unwrap(), [[[vec![0], vec![1, 2]]]]);
    assert_eq!(
        rounds(&[15, 3, 3, 9], 1, alone, 1).unwrap(),
        [vec![vec![vec![0]]], vec![vec![vec![3], vec![1, 2]]]]
    );
}

#[test]
fn samples_may_be_counted_instead() {
    let by_count = Options { budget: Budget::Samples(2), ..options(1) };
    let all = rounds(&[5, 6, 7, 8, 9], 5, by_count, 1).unwrap();
    assert_eq!(all, [vec![vec![vec![0, 1]]], vec![vec![vec![4], vec![2, 3]]]]);
}

#[test]
fn bad_arguments_and_too_few_samples_are_refused() {
    plan_error(Online::new(options(10), 0), &["look_ahead is 0"]);
    plan_error(Online::new(options(0), 1), &["max_tokens_per_gpu is 0"]);
    plan_error(rounds(&[3], 1, Options { dp_size: 2, ..options(10) }, 1), &["1 sample, ", "dp_size 2"]);
    let filled_up = Options { dp_size: 2, placeholders: true, ..options(10) };
    assert_eq!(rounds(&[3], 1, filled_up, 1).unwrap(), [[vec![vec![0]], vec![vec![]]]]);
}

#[test]
fn positions_stay_int32() {
    let by_count = Options { budget: Budget::Samples(2), ..options(1) };
    plan_error(rounds(&[2_000_000_000; 4], 1, by_count, 1), &["4000000000 padded tokens", "smaller"]);
}

proptest! {
    #![proptest_config(cases(2000))]

    #[test]
    fn an_arriving_step_keeps_the_rules_of_a_plan(
        lengths in prop::collection::vec(1i64..60, 1..200),
        parts in 1usize..40,
        (budget, dp_size, multiple, look_ahead) in (1i64..80, 1i64..5, 1i64..4, 1i64..4),
        (cp_size, zigzag, by_count, placeholders) in (1i64..4, any::<bool>(), any::<bool>(), any::<bool>()),
    ) {
        let layout = if zigzag { Layout::Zigzag } else { Layout::Contiguous };
        let options = Options {
            budget: if by_count { Budget::Samples(budget) } else { Budget::TokensPerGpu(budget) },
            oversize_alone: true,
            dp_size,
            micro_batch_multiple: multiple,
            placeholders,
            cut: cut(cp_size, layout),
            cost: CostModel::ATTENTION,
            ..options(1)
        };
        let all = match rounds(&lengths, parts, options, look_ahead) {
            Ok(all) => all,
            Err(error) => {
                // At the end there may be fewer samples than micro-batches on all ranks.
                prop_assert!(error.to_string().contains(" missing. Lower"), "{}", error);
                prop_assert!(!placeholders);
                return Ok(());
            }
        };
        // However they come.
        prop_assert_eq!(&all, &rounds(&lengths, lengths.len(), options, look_ahead).unwrap());

        // Each sample once.
        let mut placed: Vec<usize> = all.iter().flatten().flatten().flatten().copied().collect();
        placed.sort_unstable();
        prop_assert_eq!(placed, (0..lengths.len()).collect::<Vec<_>>());

        let (one, total) = match (cp_size, layout) {
            (1, _) => (1, 1),
            (c, Layout::Zigzag) => (2 * c, 2 * c),
            (c, Layout::Contiguous) => (1, c),
        };
        let full = all.len() - 1;
        for (n, round) in all.iter().enumerate() {
            prop_assert_eq!(round.len() as i64, dp_size);
            for rank in round {
                prop_assert_eq!(rank.len(), round[0].len());
                prop_assert_eq!(rank.len() as i64 % multiple, 0);
                prop_assert!(n == full || rank.len() as i64 == multiple);
                for samples in rank {
                    prop_assert!(samples.is_sorted());
                    prop_assert!(!samples.is_empty() || placeholders && n == full);
                    let sum: i64 = samples.iter().map(|s| up(lengths[*s], one)).sum();
                    let fits = if by_count { samples.len() as i64 <= budget } else { up(sum, total) <= budget * cp_size };
                    prop_assert!(fits || samples.len() == 1, "{:?} of {:?}", samples, lengths);
                }
            }
        }
        // Bounded: the first round holds the first sample, and each round the oldest that was left before it.
        let mut left: Vec<usize> = (0..lengths.len()).collect();
        for round in &all {
            let here: Vec<usize> = round.iter().flatten().flatten().copied().collect();
            prop_assert!(here.contains(&left[0]));
            left.retain(|s| !here.contains(s));
        }
    }
}
