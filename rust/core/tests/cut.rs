//! Padding and the cut over context-parallel ranks.
#![allow(clippy::unwrap_used)] // a test that cannot go on has failed

mod common;

use common::{cases, cut, lcm, plan_error, up};
use proptest::prelude::*;
use rollpack_core::cut::{Cut, Layout, MAX_TOKENS};

#[test]
fn one_rank_pads_nothing() {
    for layout in [Layout::Zigzag, Layout::Contiguous] {
        let cut = cut(1, layout);
        let starts = cut.starts(&[5, 1, 3]);
        assert_eq!(starts, [0, 5, 6, 9]);
        assert_eq!(cut.runs(&starts, 0), [(0, 0..5), (1, 0..1), (2, 0..3)]);
    }
}

#[test]
fn zigzag_pads_each_sequence_and_takes_chunks_from_both_ends() {
    let cut = cut(2, Layout::Zigzag);
    assert_eq!([1, 4, 5, 8].map(|n| cut.padded(n)), [4, 4, 8, 8]);
    let starts = cut.starts(&[5, 3]);
    assert_eq!(starts, [0, 8, 12]);
    // 8 in chunks of 2: 0 and 3 | 1 and 2. 4 in chunks of 1.
    assert_eq!(cut.runs(&starts, 0), [(0, 0..2), (0, 6..8), (1, 0..1), (1, 3..4)]);
    assert_eq!(cut.runs(&starts, 1), [(0, 2..4), (0, 4..6), (1, 1..2), (1, 2..3)]);
}

#[test]
fn zigzag_over_three_ranks() {
    let cut = cut(3, Layout::Zigzag);
    let starts = cut.starts(&[12]);
    assert_eq!(cut.runs(&starts, 0), [(0, 0..2), (0, 10..12)]);
    assert_eq!(cut.runs(&starts, 1), [(0, 2..4), (0, 8..10)]);
    assert_eq!(cut.runs(&starts, 2), [(0, 4..6), (0, 6..8)]);
}

#[test]
fn contiguous_pads_the_micro_batch_and_takes_one_run() {
    let cut = cut(2, Layout::Contiguous);
    assert_eq!(cut.padded(5), 5);
    let starts = cut.starts(&[5, 3]);
    assert_eq!(starts, [0, 5, 8]);
    assert_eq!(cut.runs(&starts, 0), [(0, 0..4)]);
    assert_eq!(cut.runs(&starts, 1), [(0, 4..5), (1, 0..3)]);

    // 7 tokens become 8, and the padding belongs to the last sequence.
    let starts = cut.starts(&[1, 1, 5]);
    assert_eq!(starts, [0, 1, 2, 8]);
    assert_eq!(cut.runs(&starts, 0), [(0, 0..1), (1, 0..1), (2, 0..2)]);
    assert_eq!(cut.runs(&starts, 1), [(2, 2..6)]);
}

#[test]
fn a_contiguous_rank_may_hold_nothing_but_padding() {
    let cut = cut(4, Layout::Contiguous);
    let starts = cut.starts(&[1]);
    assert_eq!(starts, [0, 4]);
    assert_eq!([0, 1, 2, 3].map(|k| cut.runs(&starts, k)), [0, 1, 2, 3].map(|k| vec![(0, k..k + 1)]));
}

#[test]
fn paddings_are_taken_together_as_the_least_common_multiple() {
    // 2C = 4 and 6: 12.
    let cut = Cut::new(2, Layout::Zigzag, 6, 1).unwrap();
    assert_eq!([1, 12, 13].map(|n| cut.padded(n)), [12, 12, 24]);
    // Per sequence only: under contiguous, C concerns the whole.
    let cut = Cut::new(2, Layout::Contiguous, 3, 1).unwrap();
    assert_eq!(cut.starts(&[1]), [0, 4]);
    assert_eq!(cut.starts(&[1, 2]), [0, 3, 6]);
    // Of the micro-batch: 2C = 4 and 10 make 20.
    let cut = Cut::new(2, Layout::Zigzag, 1, 10).unwrap();
    assert_eq!(cut.starts(&[3, 5]), [0, 4, 20]);
    let cut = Cut::new(1, Layout::Zigzag, 4, 10).unwrap();
    assert_eq!(cut.starts(&[3, 5]), [0, 4, 20]);
}

#[test]
fn capacity_is_what_padding_leaves_of_a_budget() {
    assert_eq!(Cut::new(1, Layout::Zigzag, 1, 1).unwrap().capacity(17), 17);
    assert_eq!(Cut::new(2, Layout::Zigzag, 1, 1).unwrap().capacity(17), 16);
    assert_eq!(Cut::new(2, Layout::Zigzag, 1, 10).unwrap().capacity(39), 20);
    assert_eq!(Cut::new(2, Layout::Contiguous, 1, 1).unwrap().capacity(1), 0);
    assert_eq!(Cut::new(1, Layout::Zigzag, 1, 1).unwrap().capacity(i64::MAX), MAX_TOKENS);
}

#[test]
fn far_too_long_stays_far_too_long() {
    let cut = Cut::new(2, Layout::Zigzag, 1, 1).unwrap();
    assert!(cut.padded(i64::MAX) > MAX_TOKENS);
    assert!(cut.padded_total(i64::MAX) > MAX_TOKENS);
    assert!(cut.starts(&[MAX_TOKENS, MAX_TOKENS])[2] > MAX_TOKENS);
}

#[test]
fn paddings_that_cannot_be_are_refused() {
    for bad in [0, -1, i64::MAX] {
        let text = format!("is {bad}");
        plan_error(Cut::new(bad, Layout::Zigzag, 1, 1), &["cp_size", &text]);
        plan_error(Cut::new(1, Layout::Zigzag, bad, 1), &["pad_to_multiple_of", &text]);
        plan_error(Cut::new(1, Layout::Zigzag, 1, bad), &["pad_micro_batch_to_multiple_of", &text]);
    }
    plan_error(Cut::new(3, Layout::Zigzag, MAX_TOKENS, 1), &["6 and 2147483647 together"]);
    plan_error(Cut::new(MAX_TOKENS, Layout::Zigzag, 1, 1), &["together"]);
}

#[test]
fn layouts_have_two_names() {
    assert_eq!(Layout::parse("zigzag"), Ok(Layout::Zigzag));
    assert_eq!(Layout::parse("contiguous"), Ok(Layout::Contiguous));
    plan_error(Layout::parse("ring"), &["'ring'", "zigzag or contiguous"]);
}

proptest! {
    #![proptest_config(cases(300))]

    #[test]
    fn the_ranks_tile_every_padded_sequence_once(
        lengths in prop::collection::vec(1..40_i64, 1..12),
        cp_size in 1..6_i64,
        zigzag in any::<bool>(),
        pads in (1..7_i64, 1..30_i64),
    ) {
        let layout = if zigzag { Layout::Zigzag } else { Layout::Contiguous };
        let cut = Cut::new(cp_size, layout, pads.0, pads.1).unwrap();
        let starts = cut.starts(&lengths);

        let sequence = if zigzag && cp_size > 1 { 2 * cp_size } else { 1 };
        let whole = if zigzag && cp_size > 1 { 2 * cp_size } else { cp_size };
        let mut expected = vec![0];
        for length in &lengths {
            expected.push(expected.last().unwrap() + up(*length, lcm(sequence, pads.0)));
        }
        let end = expected.last_mut().unwrap();
        *end = up(*end, lcm(whole, pads.1));
        prop_assert_eq!(&starts, &expected);

        let mut holders: Vec<Vec<i64>> =
            starts.windows(2).map(|w| vec![-1; (w[1] - w[0]) as usize]).collect();
        for rank in 0..cp_size {
            let mut held = 0;
            for (i, run) in cut.runs(&starts, rank) {
                held += run.end - run.start;
                for position in run {
                    prop_assert_eq!(holders[i][position as usize], -1, "held twice");
                    holders[i][position as usize] = rank;
                }
            }
            prop_assert_eq!(held * cp_size, starts[lengths.len()], "T is the same on each rank");
        }
        prop_assert!(holders.concat().iter().all(|rank| *rank >= 0), "a position that nobody holds");
        if zigzag {
            // Symmetric: a position and its mirror image are on one rank.
            prop_assert!(cp_size == 1 || holders.iter().all(|h| h.iter().eq(h.iter().rev())));
        } else {
            prop_assert!(holders.concat().is_sorted());
        }
    }

    /// A micro-batch fits its budget exactly where its padded sequences fit the capacity.
    #[test]
    fn capacity_and_padded_total_agree(
        sum in 1..200_i64,
        budget in 1..200_i64,
        cp_size in 1..5_i64,
        pad in 1..20_i64,
    ) {
        for layout in [Layout::Zigzag, Layout::Contiguous] {
            let cut = Cut::new(cp_size, layout, 1, pad).unwrap();
            prop_assert_eq!(cut.padded_total(sum) <= budget, sum <= cut.capacity(budget));
        }
    }
}
