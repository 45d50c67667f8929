//! How few and how even: held on small inputs against every possibility there is, and against values worked out by hand.
#![allow(clippy::unwrap_used, clippy::panic)] // a test that cannot go on has failed

mod common;

use common::cases;
use proptest::prelude::*;
use rollpack_core::balance::{Limit, Shape, Sync, schedule};
use rollpack_core::bins::{best_fit_decreasing, few_bins, fill_each, longest_first};
use rollpack_core::cost::Cost;
use rollpack_core::lockstep::{deal_rounds, level_fill};
use rollpack_core::partition::{differencing, partition};

fn shape(limit: Limit, dp_size: usize, sync: Sync) -> Shape {
    Shape { dp_size, limit, multiple: 1, placeholders: false, sync }
}

fn load(costs: &[Cost], samples: &[usize]) -> Cost {
    samples.iter().map(|s| costs[*s]).sum()
}

/// Tokens cost 1 each.
fn by_tokens(lengths: &[i64]) -> Vec<Cost> {
    lengths.iter().map(|n| *n as Cost).collect()
}

/// The fewest bins that hold these lengths, by trying every way.
fn fewest(lengths: &[i64], capacity: i64) -> usize {
    fn place(rest: &[i64], bins: &mut Vec<i64>, capacity: i64, best: &mut usize) {
        let Some((length, rest)) = rest.split_first() else {
            *best = bins.len().min(*best);
            return;
        };
        for i in 0..bins.len() {
            if bins[i] + length <= capacity {
                bins[i] += length;
                place(rest, bins, capacity, best);
                bins[i] -= length;
            }
        }
        bins.push(*length);
        place(rest, bins, capacity, best);
        bins.pop();
    }
    let mut best = lengths.len();
    place(lengths, &mut Vec::new(), capacity, &mut best);
    best
}

/// The most that a subset of these lengths fills of `room`.
fn fullest(lengths: &[i64], room: i64) -> i64 {
    let sums = (0..1u32 << lengths.len())
        .map(|chosen| (0..lengths.len()).filter(|i| chosen >> i & 1 == 1).map(|i| lengths[i]).sum::<i64>());
    sums.filter(|sum| *sum <= room).max().unwrap()
}

/// Whether no swap of two samples makes the slowest faster: each of `parts` is a list of micro-batches, of at most `cap`
/// tokens. Where several are the slowest, one of them cannot be made faster. Of parts with more than `most` samples not
/// every pair is tried.
fn no_swap_helps(lengths: &[i64], costs: &[Cost], parts: &[Vec<Vec<usize>>], cap: i64, most: usize) -> bool {
    let total = |part: &[Vec<usize>]| part.iter().map(|bin| load(costs, bin)).sum::<Cost>();
    let room = |bin: &[usize]| cap - bin.iter().map(|s| lengths[*s]).sum::<i64>();
    let slowest = parts.iter().map(|part| total(part)).max().unwrap();
    let swapped = |from: &Vec<usize>, to: &Vec<usize>, faster: Cost| {
        let mut pairs = from.iter().flat_map(|a| to.iter().map(move |b| (*a, *b)));
        pairs.any(|(a, b)| {
            let longer = lengths[a] - lengths[b];
            let fits = longer <= room(to) && -longer <= room(from);
            fits && costs[a] > costs[b] && costs[a] - costs[b] < slowest - faster
        })
    };
    let helps = |slow: &Vec<Vec<usize>>, other: &Vec<Vec<usize>>| {
        slow.iter().any(|from| other.iter().any(|to| swapped(from, to, total(other))))
    };
    let others = || parts.iter().filter(|part| part.concat().len() <= most);
    parts.iter().filter(|part| total(part) == slowest).any(|slow| !others().any(|other| helps(slow, other)))
}

/// What waits for each other: ranks, or the micro-batches of each round.
fn waiting(made: &[Vec<usize>], dp_size: usize, sync: Sync) -> Vec<Vec<Vec<Vec<usize>>>> {
    let per_rank = made.len() / dp_size;
    match sync {
        Sync::Step => vec![made.chunks(per_rank).map(<[_]>::to_vec).collect()],
        Sync::MicroBatch => (0..per_rank)
            .map(|k| made[k..].iter().step_by(per_rank).map(|bin| vec![bin.clone()]).collect())
            .collect(),
    }
}

proptest! {
    #![proptest_config(cases(100))]

    #[test]
    fn each_bin_of_the_second_method_is_as_full_as_can_be(lengths in prop::collection::vec(1..40_i64, 1..8)) {
        let bins = fill_each(&lengths, 50, 500).lists();
        let mut left: Vec<usize> = longest_first(&lengths);
        for bin in &bins {
            prop_assert_eq!(bin[0], left[0], "the longest that is left comes first");
            let of = |samples: &[usize]| -> Vec<i64> { samples.iter().map(|s| lengths[*s]).collect() };
            let filled: i64 = of(&bin[1..]).iter().sum();
            prop_assert_eq!(filled, fullest(&of(&left[1..]), 50 - lengths[bin[0]]));
            left.retain(|sample| !bin.contains(sample));
        }
        prop_assert!(left.is_empty());
    }

    #[test]
    fn best_fit_is_at_most_one_over_the_fewest(lengths in prop::collection::vec(1..30_i64, 1..9)) {
        // Of so few samples.
        let fewest = fewest(&lengths, 30);
        let found = best_fit_decreasing(&lengths, 30).len();
        prop_assert!(found <= fewest + 1, "{} where {} would do", found, fewest);
        let searched = few_bins(&lengths, 30, |_| false).len();
        prop_assert!((fewest..=found).contains(&searched));
    }

    /// Both where lengths are close to each other and where they are not, as these are sorted in two ways.
    #[test]
    fn longest_first_is_a_stable_sort(lengths in prop::collection::vec(0..200_i64, 0..60), scale in 1..1_000_i64) {
        let lengths: Vec<i64> = lengths.iter().map(|n| n / 20 * scale).collect();
        let mut expected: Vec<usize> = (0..lengths.len()).collect();
        expected.sort_by(|a, b| lengths[*b].cmp(&lengths[*a]).then(a.cmp(b)));
        prop_assert_eq!(longest_first(&lengths), expected);
    }

    #[test]
    fn counted_out_no_swap_makes_the_slowest_faster(
        costs in prop::collection::vec(1..200_u128, 6..20),
        dp_size in 2..4_usize,
        size in 2..5_usize,
    ) {
        let lengths = vec![1; costs.len()];
        for sync in [Sync::Step, Sync::MicroBatch] {
            let made = schedule(0, &lengths, &costs, &shape(Limit::Samples(size), dp_size, sync)).unwrap().lists();
            for parts in waiting(&made, dp_size, sync) {
                prop_assert!(no_swap_helps(&lengths, &costs, &parts, i64::MAX, usize::MAX), "{:?}", parts);
            }
        }
    }
}

/// Under a cap of 60, where ranks have up to three samples, so that every pair is tried.
fn under_the_cap_no_swap_helps(lengths: &[i64], dp_size: usize, quadratic: i64, sync: Sync) -> bool {
    const CAP: i64 = 60;
    let costs: Vec<Cost> = lengths.iter().map(|n| (*n + quadratic * n * n) as Cost).collect();
    let Ok(made) =
        schedule(0, lengths, &costs, &shape(Limit::Tokens(CAP), dp_size, sync)).map(|bins| bins.lists())
    else {
        return true;
    };
    waiting(&made, dp_size, sync).iter().all(|parts| no_swap_helps(lengths, &costs, parts, CAP, 3))
}

proptest! {
    #![proptest_config(cases(200))]

    #[test]
    fn under_the_cap_no_swap_makes_the_slowest_faster(
        lengths in prop::collection::vec(1..40_i64, 8..13),
        dp_size in 2..5_usize,
        quadratic in 0..2_i64,
        micro_batch in any::<bool>(),
    ) {
        let sync = if micro_batch { Sync::MicroBatch } else { Sync::Step };
        prop_assert!(under_the_cap_no_swap_helps(&lengths, dp_size, quadratic, sync));
    }
}

#[test]
fn room_that_one_swap_leaves_is_used_by_the_next() {
    assert!(under_the_cap_no_swap_helps(&[37, 14, 35, 7, 19, 28, 27, 1, 23, 7], 4, 1, Sync::Step));
}

#[test]
fn a_search_for_what_no_combination_fills_ends() {
    // Even lengths never fill an odd cap, so it is the bound in work that ends it, and not 2^80 combinations. They are 6480
    // together, and 1000 of them go into a bin: 7 bins.
    let lengths: Vec<i64> = (1..=80).map(|n| 2 * n).collect();
    assert_eq!(fill_each(&lengths, 1001, 500).len(), 7);
}

#[test]
fn of_several_ways_to_deal_the_most_even_is_taken() {
    // Two ranks cannot do less than half of the tokens each, rounded up.
    for (lengths, cap) in [
        (vec![6, 4, 7, 1, 1], 16),
        (vec![2, 4, 3, 7, 12, 3], 18),
        (vec![12, 1, 9, 3, 2], 12),
        (vec![4, 2, 12, 10, 9], 13),
        (vec![5, 6, 1, 5, 12, 10], 19),
        (vec![12, 3, 3, 6, 9, 11, 1], 15),
    ] {
        for unit in [1, 10_000] {
            let costs: Vec<Cost> = lengths.iter().map(|n| (*n * unit) as Cost).collect();
            let made =
                schedule(0, &lengths, &costs, &shape(Limit::Tokens(cap), 2, Sync::Step)).unwrap().lists();
            let ranks = made.chunks(made.len() / 2).map(|rank| load(&costs, &rank.concat()));
            let half = (lengths.iter().sum::<i64>() + 1) / 2;
            assert_eq!(ranks.max().unwrap(), (half * unit) as Cost, "{lengths:?}");
        }
    }
}

#[test]
fn the_cap_holds_where_another_cut_would_cost_less() {
    // Costs are s * s: the four of 1 cost 4 beside the 9 of the 3, and a fifth has no room with them.
    let (lengths, costs) = ([3, 1, 1, 1, 1, 1], [9, 1, 1, 1, 1, 1]);
    for sync in [Sync::Step, Sync::MicroBatch] {
        let made = schedule(0, &lengths, &costs, &shape(Limit::Tokens(4), 2, sync)).unwrap().lists();
        assert_eq!(made.iter().map(Vec::len).collect::<Vec<_>>(), [2, 4]);
        assert_eq!(made[0][0], 0);
    }
}

#[test]
fn a_bin_is_split_until_no_micro_batch_is_empty() {
    let sizes = |num_samples: usize, multiple: usize| {
        let shape = Shape { multiple, ..shape(Limit::Tokens(100), 1, Sync::Step) };
        let made = schedule(0, &vec![1; num_samples], &vec![1; num_samples], &shape).unwrap().lists();
        let mut sizes: Vec<usize> = made.iter().map(Vec::len).collect();
        sizes.sort_unstable();
        sizes
    };
    // All fit in one: in two halves, those in halves again, and the larger ones once more.
    assert_eq!(sizes(4, 2), [2, 2]);
    assert_eq!(sizes(5, 4), [1, 1, 1, 2]);
    assert_eq!(sizes(7, 7), [1; 7]);
}

#[test]
fn a_length_that_is_absurd_is_sorted_without_counting_up_to_it() {
    assert_eq!(longest_first(&[3, 1 << 60]), [1, 0]);
    assert_eq!(longest_first(&[3, 1 << 60, i64::MAX]), [2, 1, 0]);
    assert_eq!(longest_first(&[-2, 5, -3, 5]), [1, 3, 0, 2]);
}

#[test]
fn rooms_larger_than_a_table_are_found_too() {
    // Room for 10 million tokens: 7 + 3, 5 + 5, as where it is for 10.
    let lengths = [7_000_000, 5_000_000, 3_000_000, 5_000_000];
    assert_eq!(best_fit_decreasing(&lengths, 10_000_000).lists(), [vec![0, 2], vec![1, 3]]);
    // Of two bins with the same room the one that was filled last is taken: the 1 joins the second 6.
    let lengths = [6_000_000, 6_000_000, 4_000_001, 1];
    assert_eq!(best_fit_decreasing(&lengths, 10_000_000).lists(), [vec![0], vec![1, 3], vec![2]]);
    assert_eq!(best_fit_decreasing(&[6, 6, 5, 1], 10).lists(), [vec![0], vec![1, 3], vec![2]]);
}

#[test]
fn differencing_of_three_parts() {
    // 9, 8 and 7 are merged to (9, 8, 7), a difference of 2; 6, 5 and 4 to (6, 5, 4); those to 9 + 4, 8 + 5, 7 + 6.
    let costs = [9, 8, 7, 6, 5, 4];
    let mut loads: Vec<Cost> = differencing(&costs, 3).iter().map(|part| load(&costs, part)).collect();
    loads.sort_unstable();
    assert_eq!(loads, [13, 13, 13]);
    assert_eq!(partition(&costs, 1), [vec![0, 1, 2, 3, 4, 5]]);
}

#[test]
fn rounds_are_dealt_heavy_first_and_each_heaviest_to_who_did_least() {
    // Rounds of two: 3 and 4, then 9 and 2.
    let costs = [3, 4, 9, 2];
    let bins = vec![vec![0], vec![1], vec![2], vec![3]];
    // The second is the heavier: 9 to rank 0, 2 to rank 1, who then takes the 4.
    assert_eq!(deal_rounds(bins, &costs, 2), [vec![2], vec![0], vec![3], vec![1]]);
}

#[test]
fn a_round_is_filled_up_to_its_share_too() {
    // Eighteen of 5 over three rounds of two: 15 each, as the share, first of 90 / 6 and then of 60 / 4 and 30 / 2, is more
    // than the longest.
    let lengths = [5; 18];
    let bins = level_fill(&lengths, &by_tokens(&lengths), 100, 2, 3).unwrap().lists();
    assert_eq!(bins.iter().map(Vec::len).collect::<Vec<_>>(), [3; 6]);
    // One round takes all that there is, though that is far over an even share.
    assert_eq!(level_fill(&[3, 3, 3], &[3, 3, 3], 100, 2, 1).unwrap().lists(), [vec![0, 2], vec![1]]);
    assert_eq!(
        level_fill(&[3, 2, 1, 1, 1], &[3, 2, 1, 1, 1], 100, 2, 1).unwrap().lists(),
        [vec![0, 3], vec![1, 2, 4]]
    );
}

#[test]
fn a_round_leaves_one_sample_for_each_micro_batch_to_come() {
    // Beside the 4 there is time for three more of 1, and two have to stay for the second round.
    let alone: Vec<Vec<usize>> = (0..4).map(|sample| vec![sample]).collect();
    assert_eq!(level_fill(&[4, 1, 1, 1], &[4, 1, 1, 1], 100, 2, 2).unwrap().lists(), alone);
}

#[test]
fn rounds_that_cannot_be_filled_are_none() {
    // Fewer samples than micro-batches; under the cap in no order; more samples than are tried.
    assert_eq!(level_fill(&[3, 2, 1], &[3, 2, 1], 10, 2, 2), None);
    assert_eq!(level_fill(&[7, 7, 7], &[7, 7, 7], 10, 1, 2), None);
    let many = vec![1; (1 << 17) + 1];
    assert_eq!(level_fill(&many, &by_tokens(&many), i64::MAX, 1, 1), None);
}
