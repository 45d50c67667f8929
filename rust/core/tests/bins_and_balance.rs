//! Bins under a hard cap, and a schedule in which nobody is empty and nobody waits long.
#![allow(clippy::unwrap_used, clippy::panic)] // a test that cannot go on has failed

mod common;

use common::{cases, plan_error};
use proptest::prelude::*;
use rollpack_core::balance::{Limit, Shape, Sync, schedule};
use rollpack_core::bins::{best_fit_decreasing, few_bins, fill_each, longest_first};
use rollpack_core::cost::{Cost, CostModel, total};
use rollpack_core::partition::{differencing, lpt, partition};

fn tokens(capacity: i64, dp_size: usize) -> Shape {
    Shape { dp_size, limit: Limit::Tokens(capacity), multiple: 1, placeholders: false, sync: Sync::Step }
}

fn samples(size: usize, dp_size: usize) -> Shape {
    Shape { limit: Limit::Samples(size), ..tokens(1, dp_size) }
}

fn costs(lengths: &[i64]) -> Vec<Cost> {
    lengths.iter().map(|n| CostModel::TOKENS.cost(*n)).collect()
}

fn scheduled(lengths: &[i64], shape: Shape) -> Vec<Vec<usize>> {
    schedule(0, lengths, &costs(lengths), &shape).unwrap().lists()
}

/// The lengths in each micro-batch.
fn packed(lengths: &[i64], shape: Shape) -> Vec<Vec<i64>> {
    scheduled(lengths, shape).iter().map(|m| m.iter().map(|i| lengths[*i]).collect()).collect()
}

#[test]
fn the_longest_come_first_and_equal_ones_in_input_order() {
    assert_eq!(longest_first(&[3, 5, 3, 9]), [3, 1, 0, 2]);
}

#[test]
fn best_fit_leaves_the_least_room() {
    assert_eq!(best_fit_decreasing(&[7, 5, 3, 5], 10).lists(), [vec![0, 2], vec![1, 3]]);
    assert_eq!(best_fit_decreasing(&[3, 3, 3, 7, 7, 7], 10).len(), 3);
    // First fit would put the 2 beside the 6, where it leaves room of 2; beside the 8 it leaves none.
    assert_eq!(best_fit_decreasing(&[6, 8, 2], 10).lists(), [vec![1, 2], vec![0]]);
    assert!(best_fit_decreasing(&[], 10).is_empty());
    assert!(!best_fit_decreasing(&[1], 10).is_empty());
}

#[test]
fn a_second_method_finds_what_best_fit_does_not() {
    // Best fit puts 4 and 4 together, beside which there is no room for a 3.
    let lengths = [4, 4, 3, 3, 3, 3];
    assert_eq!(best_fit_decreasing(&lengths, 10).len(), 3);
    assert_eq!(fill_each(&lengths, 10, 4).lists(), [vec![0, 2, 3], vec![1, 4, 5]]);
    assert_eq!(few_bins(&lengths, 10, |found| found <= 2).len(), 2);
    assert_eq!(few_bins(&lengths, 10, |_| true).len(), 3); // nobody asked for fewer
    assert_eq!(packed(&lengths, tokens(10, 1)), vec![vec![4, 3, 3]; 2]);
    // Two ranks have one each then; what is over the cap is alone as before.
    assert_eq!(packed(&lengths, tokens(10, 2)).len(), 2);
    assert_eq!(packed(&[4, 4, 3, 3, 3, 3, 11], tokens(10, 1)).len(), 3);
    assert!(fill_each(&[], 10, 4).is_empty());
}

#[test]
fn differencing_beats_lpt_and_the_other_way_round() {
    // The textbook's: LPT 8 + 5 + 4 and 7 + 6; differencing 8 - 7 = 1, 6 - 5 = 1, 4 - 1 = 3, 3 - 1 = 2: 16 and 14.
    let costs = [8, 7, 6, 5, 4];
    let loads = |parts: Vec<Vec<usize>>, costs: &[Cost]| {
        let mut loads: Vec<Cost> = parts.iter().map(|p| p.iter().map(|i| costs[*i]).sum()).collect();
        loads.sort_unstable();
        loads
    };
    assert_eq!(loads(lpt(&costs, &[5, 5], 0), &costs), [13, 17]);
    assert_eq!(loads(differencing(&costs, 2), &costs), [14, 16]);
    assert_eq!(loads(partition(&costs, 2), &costs), [14, 16]);
    // Parts without an item, and none to deal.
    assert_eq!(loads(differencing(&[3, 1], 4), &[3, 1]), [0, 0, 1, 3]);
    assert_eq!(partition(&[], 2), [vec![], vec![]] as [Vec<usize>; 2]);
}

#[test]
fn lpt_gives_the_heaviest_to_the_lightest() {
    assert_eq!(lpt(&[1, 5, 4, 2], &[4, 4], 0), [vec![1, 0], vec![2, 3]]);
    // A full part takes no more, and one without room takes nothing.
    assert_eq!(lpt(&[1, 5, 4, 2], &[1, 3], 0), [vec![1], vec![2, 3, 0]]);
    assert_eq!(lpt(&[1, 2], &[0, 2], 0), [vec![], vec![1, 0]]);
    // One more, each, in as many parts as are allowed that.
    assert_eq!(lpt(&[9, 1, 1], &[1, 1], 1), [vec![0], vec![1, 2]]);
    assert_eq!(lpt(&[9, 1, 1, 1], &[1, 1], 2), [vec![0, 3], vec![1, 2]]);
}

#[test]
fn the_examples_of_the_issue() {
    assert_eq!(packed(&[8, 8, 8], tokens(16, 1)).len(), 2);
    assert_eq!(packed(&[7; 8], tokens(8, 1)), vec![vec![7]; 8]);
    assert_eq!(packed(&[4, 4, 4, 1, 1, 1], tokens(4, 2)).len(), 4);
    let mut two = packed(&[7, 5, 3, 5], tokens(10, 1));
    two.sort();
    assert_eq!(two, [[5, 5], [7, 3]]);
    assert_eq!(packed(&[3, 3, 3, 7, 7, 7], tokens(10, 1)), vec![vec![3, 7]; 3]);
}

#[test]
fn what_is_over_the_cap_is_alone() {
    let mut three = packed(&[15, 3, 3], tokens(10, 1));
    three.sort();
    assert_eq!(three, [vec![3, 3], vec![15]]);
    let mut two = packed(&[3, 15], tokens(10, 1));
    two.sort();
    assert_eq!(two, [[3], [15]]);
    // Also where nothing at all fits, and where there are more slots than bins.
    assert_eq!(packed(&[15, 15], tokens(0, 1)).len(), 2);
    let mut four = packed(&[15, 3, 3, 3], tokens(10, 4));
    four.sort();
    assert_eq!(four, [[3], [3], [3], [15]]);
    // The rest is evened out all the same: not 10 and 2.
    let mut even = packed(&[15, 2, 2, 2, 2, 2, 2], tokens(10, 3));
    even.sort();
    assert_eq!(even, [vec![2, 2, 2], vec![2, 2, 2], vec![15]]);
}

#[test]
fn equal_counts_differ_by_one_at_most() {
    let lengths: Vec<i64> = (0..206).map(|i| 1 + (i * 37) % 101).collect();
    for sync in [Sync::Step, Sync::MicroBatch] {
        let schedule = scheduled(&lengths, Shape { sync, ..samples(8, 4) });
        assert_eq!(schedule.len(), 28); // ceil(206 / 8) = 26, over 4 ranks 7 each
        let mut ranks: Vec<usize> = schedule.chunks(7).map(|rank| rank.iter().map(Vec::len).sum()).collect();
        ranks.sort_unstable();
        assert_eq!(ranks, [51, 51, 52, 52]);
        assert!(schedule.iter().all(|m| m.len() == 7 || m.len() == 8));
    }
}

#[test]
fn the_number_of_micro_batches_is_a_multiple() {
    // Three bins, so four micro-batches, and the fourth is not empty.
    let schedule = scheduled(&[1; 6], Shape { multiple: 4, ..tokens(2, 1) });
    assert_eq!(schedule.len(), 4);
    assert!(schedule.iter().all(|m| !m.is_empty()));
    assert_eq!(scheduled(&[1; 12], Shape { multiple: 3, ..tokens(2, 2) }).len(), 6);
    assert_eq!(scheduled(&[1; 14], Shape { multiple: 3, ..tokens(2, 2) }).len(), 12);
    assert_eq!(scheduled(&[1; 14], Shape { multiple: 3, ..samples(2, 2) }).len(), 12);
}

#[test]
fn too_few_samples_says_how_many_are_missing() {
    let refused = |lengths: &[i64], shape: Shape| schedule(3, lengths, &costs(lengths), &shape);
    plan_error(
        refused(&[5], tokens(10, 4)),
        &["step 3 has 1 sample,", "dp_size 4 x 1", "at least 4", "3 missing", "placeholders=True"],
    );
    plan_error(
        refused(&[1, 1, 1], Shape { multiple: 4, ..tokens(1, 1) }),
        &["3 samples", "at least 4", "1 missing", "micro_batch_multiple"],
    );
    plan_error(refused(&[1, 1, 1], samples(8, 4)), &["1 missing"]);
}

#[test]
fn placeholders_fill_what_is_missing() {
    for shape in [tokens(10, 4), samples(4, 4), Shape { sync: Sync::MicroBatch, ..tokens(10, 4) }] {
        let schedule = scheduled(&[5, 2], Shape { placeholders: true, multiple: 2, ..shape });
        assert_eq!(schedule.len(), 8);
        assert_eq!(schedule.iter().filter(|m| m.is_empty()).count(), 6);
        assert!(schedule.iter().all(|m| m.len() <= 1));
    }
    // Where there are enough samples they change nothing.
    let lengths = [4, 4, 4, 1, 1, 1];
    let with = scheduled(&lengths, Shape { placeholders: true, ..tokens(4, 2) });
    assert_eq!(with, scheduled(&lengths, tokens(4, 2)));
}

#[test]
fn an_absurd_number_of_micro_batches_is_refused() {
    let shape = Shape { placeholders: true, multiple: 1 << 30, ..tokens(10, 1 << 30) };
    plan_error(schedule(0, &[1], &[1], &shape), &["micro-batches", "lower dp_size"]);
}

#[test]
fn synchronised_once_a_step_ranks_do_the_same_in_all() {
    // Two ranks with two micro-batches each: 9 + 4 and 8 + 5.
    let step = packed(&[9, 8, 5, 4], tokens(9, 2));
    let loads: Vec<i64> = step.chunks(2).map(|rank| rank.iter().flatten().sum()).collect();
    assert_eq!(loads, [13, 13]);
}

#[test]
fn synchronised_at_every_micro_batch_neighbours_in_cost_run_together() {
    let step = packed(&[9, 8, 5, 4], Shape { sync: Sync::MicroBatch, ..tokens(9, 2) });
    // 9 beside 8, 5 beside 4; the rank that had the 9 gets the 4.
    assert_eq!(step, [[9], [4], [8], [5]]);
    let counted = packed(&[9, 8, 5, 4], Shape { sync: Sync::MicroBatch, ..samples(1, 2) });
    assert_eq!([&counted[0], &counted[2]], [&[9], &[8]]);
}

#[test]
fn a_round_is_filled_to_the_cost_of_its_longest() {
    // Costs are s * s: beside the 9 (81) lie 7 + 5 (74), and not 7 + 6 (85); then 6 + 5 (61) beside 5 + 5 + 3 (59).
    let lengths = [9, 7, 6, 5, 5, 5, 5, 3];
    let costs: Vec<Cost> = lengths.iter().map(|n| CostModel::new(0, 1).unwrap().cost(*n)).collect();
    let shape = Shape { sync: Sync::MicroBatch, ..tokens(13, 2) };
    let rounds = schedule(0, &lengths, &costs, &shape).unwrap().lists();
    let cost_of = |m: &Vec<usize>| m.iter().map(|i| costs[*i]).sum::<Cost>();
    // Rank after rank, two micro-batches each; the rank that had the 9 does less in the second round.
    assert_eq!(rounds.iter().map(cost_of).collect::<Vec<_>>(), [81, 59, 74, 61]);
}

#[test]
fn swaps_make_even_what_lpt_leaves() {
    // LPT gives 8 + 5 + 4 and 7 + 6. Swapping 8 and 6 makes both 15.
    for sync in [Sync::Step, Sync::MicroBatch] {
        for shape in [samples(3, 2), tokens(17, 2)] {
            let mut two = packed(&[8, 7, 6, 5, 4], Shape { sync, ..shape });
            two.sort();
            assert_eq!(two, [vec![6, 5, 4], vec![8, 7]]);
        }
    }
}

/// Lengths of many short and few long samples, up to `longest`, and no two runs differ.
fn skewed(n: u64, longest: i64) -> Vec<i64> {
    let mut state = 1u64;
    let mut uniform = || {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (state >> 33) as f64 / (1u64 << 31) as f64
    };
    // Nearly lognormal: the sum of twelve uniform numbers, less 6, is nearly normal.
    let normal = |uniform: &mut dyn FnMut() -> f64| (0..12).map(|_| uniform()).sum::<f64>() - 6.0;
    (0..n).map(|_| ((2048.0 * normal(&mut uniform).exp()) as i64).clamp(1, longest)).collect()
}

/// What no schedule of rounds of `dp_size` micro-batches of at most `cap` tokens can be below, under the attention cost.
///
/// A round whose longest sample is x costs at least c(x). Of samples over half the cap a micro-batch holds one, so round j
/// has at least the cost of the `j * dp_size + 1`-th longest while that is over the half. A micro-batch whose longest is x
/// holds at most c(x) + c(cap - x), or cap tokens at the price of x where x is under the half. What these rounds cannot
/// hold is spread evenly over the ranks at best.
fn lockstep_bound(lengths: &[i64], dp_size: usize, cap: i64) -> f64 {
    let cost = |n: i64| CostModel::ATTENTION.cost(n) as f64;
    let most = |n: i64| if 2 * n >= cap { cost(n) + cost(cap - n) } else { cost(n) / n as f64 * cap as f64 };
    let order = longest_first(lengths);
    let all: f64 = lengths.iter().map(|n| cost(*n)).sum();
    let (mut leads, mut held, mut bound) = (0.0, 0.0, all / dp_size as f64);
    for (j, round) in order.chunks(dp_size).enumerate() {
        if j > 0 && 2 * lengths[round[0]] <= cap {
            break;
        }
        let lead = cost(lengths[round[0]]);
        leads += lead;
        held += round.iter().map(|s| most(lengths[*s]).min(lead)).sum::<f64>();
        bound = f64::max(bound, leads + (all - held) / dp_size as f64);
    }
    bound
}

#[test]
fn nobody_waits_longer_than_the_longest_samples_make_them() {
    for (n, dp_size) in [(1024, 8), (4096, 32)] {
        let lengths = skewed(n, 32_768);
        let costs: Vec<Cost> = lengths.iter().map(|s| CostModel::ATTENTION.cost(*s)).collect();
        let even = costs.iter().sum::<Cost>() as f64 / dp_size as f64;
        let load = |m: &Vec<usize>| m.iter().map(|i| costs[*i] as f64).sum::<f64>();

        let shape = Shape { sync: Sync::MicroBatch, ..tokens(32_768, dp_size) };
        let schedule = checked(&lengths, &costs, &shape);
        let per_rank = schedule.len() / dp_size;
        let heaviest = |k: usize| schedule[k..].iter().step_by(per_rank).map(load).fold(0.0, f64::max);
        let waited: f64 = (0..per_rank).map(heaviest).sum();
        let bound = lockstep_bound(&lengths, dp_size, 32_768);
        assert!(waited >= bound * (1.0 - 1e-9), "the bound is wrong");
        assert!(waited <= bound * 1.003, "{} is over {}", waited / even, bound / even);

        let schedule = checked(&lengths, &costs, &Shape { sync: Sync::Step, ..shape });
        let ranks = schedule.chunks(schedule.len() / dp_size).map(|rank| rank.iter().map(load).sum::<f64>());
        let slowest = ranks.fold(0.0, f64::max);
        assert!(slowest <= even * 1.0005, "{}", slowest / even);
    }
}

/// A schedule in which every sample is placed once, under the cap, in as few micro-batches as best fit needs.
fn checked(lengths: &[i64], costs: &[Cost], shape: &Shape) -> Vec<Vec<usize>> {
    let Limit::Tokens(cap) = shape.limit else { panic!("no cap") };
    let schedule = schedule(0, lengths, costs, shape).unwrap().lists();
    let mut placed = schedule.concat();
    placed.sort_unstable();
    assert_eq!(placed, (0..lengths.len()).collect::<Vec<_>>());
    assert!(schedule.iter().all(|m| !m.is_empty() && m.iter().map(|i| lengths[*i]).sum::<i64>() <= cap));
    let needed = best_fit_decreasing(lengths, cap).len();
    assert!(schedule.len() <= needed.next_multiple_of(shape.dp_size));
    schedule
}

#[test]
fn names_of_sync() {
    assert_eq!(Sync::parse("step"), Ok(Sync::Step));
    assert_eq!(Sync::parse("micro_batch"), Ok(Sync::MicroBatch));
    plan_error(Sync::parse("rank"), &["'rank'", "step or micro_batch"]);
}

#[test]
fn the_cost_model() -> Result<(), rollpack_core::Error> {
    assert_eq!(CostModel::TOKENS.cost(7), 7);
    assert_eq!(CostModel::ATTENTION.cost(1000), 24_576_000 + 1_000_000);
    assert_eq!(CostModel::new(3, 2)?.cost(10), 230);
    // The largest model and the longest sequence fit, and sums stop at the top.
    let most = CostModel::new(u64::MAX, u64::MAX)?.cost(i64::from(i32::MAX));
    assert!(most > 0);
    assert_eq!(total([Cost::MAX, most]), Cost::MAX);
    plan_error(CostModel::new(0, 0), &["balances nothing"]);
    Ok(())
}

proptest! {
    #![proptest_config(cases(200))]

    #[test]
    fn bins_hold_everything_once_and_are_few(
        lengths in prop::collection::vec(1..30_i64, 0..60),
        breadth in 0..12_usize,
    ) {
        let bins = match breadth {
            0 => best_fit_decreasing(&lengths, 30).lists(),
            _ => fill_each(&lengths, 30, breadth).lists(),
        };
        let mut placed = bins.concat();
        placed.sort_unstable();
        prop_assert_eq!(placed, (0..lengths.len()).collect::<Vec<_>>());
        let loads: Vec<i64> = bins.iter().map(|b| b.iter().map(|i| lengths[*i]).sum()).collect();
        prop_assert!(loads.iter().all(|load| *load <= 30));
        // Any two bins hold more than one could, or they would be one.
        prop_assert!((0..loads.len()).all(|i| (0..i).all(|j| loads[i] + loads[j] > 30)));
    }

    #[test]
    fn a_schedule_keeps_every_rule(
        lengths in prop::collection::vec(1..40_i64, 1..60),
        limit in prop_oneof![(1..60_i64).prop_map(Limit::Tokens), (1..9_usize).prop_map(Limit::Samples)],
        dp_size in 1..6_usize,
        multiple in 1..4_usize,
        placeholders in any::<bool>(),
        micro_batch in any::<bool>(),
        quadratic in 0..3_u64,
    ) {
        let sync = if micro_batch { Sync::MicroBatch } else { Sync::Step };
        let shape = Shape { dp_size, limit, multiple, placeholders, sync };
        let model = CostModel::new(1, quadratic).unwrap();
        let costs: Vec<Cost> = lengths.iter().map(|n| model.cost(*n)).collect();
        let Ok(first) = schedule(0, &lengths, &costs, &shape).map(|bins| bins.lists()) else {
            prop_assert!(!placeholders);
            return Ok(());
        };
        prop_assert_eq!(&first, &schedule(0, &lengths, &costs, &shape).unwrap().lists());
        prop_assert_eq!(first.len() % (dp_size * multiple), 0);
        let mut placed = first.concat();
        placed.sort_unstable();
        prop_assert_eq!(placed, (0..lengths.len()).collect::<Vec<_>>());
        let empty = first.iter().filter(|m| m.is_empty()).count();
        prop_assert_eq!(empty, first.len().saturating_sub(lengths.len()));
        prop_assert!(placeholders || empty == 0);
        for members in &first {
            prop_assert!(members.is_sorted());
            match limit {
                Limit::Samples(most) => prop_assert!(members.len() <= most),
                Limit::Tokens(cap) => {
                    let load: i64 = members.iter().map(|i| lengths[*i]).sum();
                    prop_assert!(load <= cap || members.len() == 1);
                }
            }
        }
        // No more of them than best fit needs.
        let needed = match limit {
            Limit::Samples(most) => lengths.len().div_ceil(most),
            Limit::Tokens(cap) => {
                let (fitting, alone): (Vec<i64>, Vec<i64>) = lengths.iter().partition(|n| **n <= cap);
                best_fit_decreasing(&fitting, cap).len() + alone.len()
            }
        };
        prop_assert!(first.len() <= needed.div_ceil(dp_size).next_multiple_of(multiple) * dp_size);
        if matches!(limit, Limit::Samples(_)) {
            let even = |counts: Vec<usize>| counts.iter().max().unwrap() - counts.iter().min().unwrap() <= 1;
            let per_rank = first.len() / dp_size;
            prop_assert!(even(first.iter().map(Vec::len).collect()));
            prop_assert!(even(first.chunks(per_rank).map(|r| r.iter().map(Vec::len).sum()).collect()));
        }
    }

    /// Whoever got the last item was the lightest then: no two parts are further apart than one item.
    #[test]
    fn free_partitions_are_even(
        costs in prop::collection::vec(1..1000_u128, 1..60),
        parts in 1..8_usize,
        best in any::<bool>(),
    ) {
        let given = if best { partition(&costs, parts) } else { lpt(&costs, &vec![costs.len(); parts], 0) };
        let loads: Vec<Cost> = given.iter().map(|p| p.iter().map(|i| costs[*i]).sum()).collect();
        let longest = *costs.iter().max().unwrap();
        let (most, least) = (*loads.iter().max().unwrap(), *loads.iter().min().unwrap());
        prop_assert!(most - least <= longest);
        let mut placed = given.concat();
        placed.sort_unstable();
        prop_assert_eq!(placed, (0..costs.len()).collect::<Vec<_>>());
    }
}
