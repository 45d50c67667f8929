//! Padding and context parallelism: where the tokens of a micro-batch lie, and which of them a rank holds.

use std::ops::Range;

use crate::Result;
use crate::error::plan_error;

/// How context parallelism cuts a micro-batch.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Layout {
    /// Each sequence in 2C chunks; rank k holds chunks k and 2C-1-k of each.
    Zigzag,
    /// The whole micro-batch in C runs; rank k holds the k-th.
    Contiguous,
}

impl Layout {
    pub fn parse(name: &str) -> Result<Self> {
        match name {
            "zigzag" => Ok(Self::Zigzag),
            "contiguous" => Ok(Self::Contiguous),
            _ => plan_error!("layout is '{name}'; it has to be zigzag or contiguous"),
        }
    }
}

/// Paddings and the cut over context-parallel ranks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Cut {
    pub cp_size: i64,
    pub layout: Layout,
    /// Each sequence is padded to a multiple of this.
    sequence_multiple: i64,
    /// The whole micro-batch, over all its cp ranks, is padded to a multiple of this.
    total_multiple: i64,
}

/// Lengths and positions are int32 in the packed arrays.
pub const MAX_TOKENS: i64 = i32::MAX as i64;

impl Cut {
    pub fn new(
        cp_size: i64,
        layout: Layout,
        pad_to_multiple_of: i64,
        pad_micro_batch_to_multiple_of: i64,
    ) -> Result<Self> {
        for (name, value) in [
            ("cp_size", cp_size),
            ("pad_to_multiple_of", pad_to_multiple_of),
            ("pad_micro_batch_to_multiple_of", pad_micro_batch_to_multiple_of),
        ] {
            if !(1..=MAX_TOKENS).contains(&value) {
                return plan_error!("{name} is {value}; it has to be from 1 to {MAX_TOKENS}");
            }
        }
        let (sequence, total) = match layout {
            _ if cp_size == 1 => (1, 1),
            Layout::Zigzag => (2 * cp_size, 2 * cp_size),
            Layout::Contiguous => (1, cp_size),
        };
        Ok(Self {
            cp_size,
            layout,
            sequence_multiple: least_common_multiple(sequence, pad_to_multiple_of)?,
            total_multiple: least_common_multiple(total, pad_micro_batch_to_multiple_of)?,
        })
    }

    /// The padded length of one sequence.
    pub fn padded(&self, length: i64) -> i64 {
        round_up(length, self.sequence_multiple)
    }

    /// The padded length of a micro-batch whose padded sequences add up to `sum`.
    pub fn padded_total(&self, sum: i64) -> i64 {
        round_up(sum, self.total_multiple)
    }

    /// How many tokens of padded sequences a micro-batch of `budget` tokens can hold.
    pub fn capacity(&self, budget: i64) -> i64 {
        let budget = budget.min(MAX_TOKENS);
        budget - budget % self.total_multiple
    }

    /// Where each sequence begins, and the end: the padding of the micro-batch belongs to the last sequence.
    pub fn starts(&self, lengths: &[i64]) -> Vec<i64> {
        let mut starts = vec![0; lengths.len() + 1];
        for (i, length) in lengths.iter().enumerate() {
            starts[i + 1] = starts[i] + self.padded(*length);
        }
        if let Some(end) = starts.last_mut() {
            *end = self.padded_total(*end);
        }
        starts
    }

    /// What rank `cp_rank` holds, in the order in which it holds it: (sequence, positions in the padded sequence).
    pub fn runs(&self, starts: &[i64], cp_rank: i64) -> Vec<(usize, Range<i64>)> {
        let mut runs = Vec::with_capacity(2 * starts.len());
        let share = starts.last().map_or(0, |end| end / self.cp_size);
        for (sequence, bounds) in starts.windows(2).enumerate() {
            let (begin, padded) = (bounds[0], bounds[1] - bounds[0]);
            match self.layout {
                _ if self.cp_size == 1 => runs.push((sequence, 0..padded)),
                Layout::Zigzag => {
                    let chunk = padded / (2 * self.cp_size);
                    for k in [cp_rank, 2 * self.cp_size - 1 - cp_rank] {
                        runs.push((sequence, k * chunk..(k + 1) * chunk));
                    }
                }
                Layout::Contiguous => {
                    let from = (cp_rank * share - begin).clamp(0, padded);
                    let to = ((cp_rank + 1) * share - begin).clamp(0, padded);
                    if from < to {
                        runs.push((sequence, from..to));
                    }
                }
            }
        }
        runs
    }
}

/// Saturates, so that what is far too long stays far too long.
fn round_up(x: i64, multiple: i64) -> i64 {
    match x % multiple {
        0 => x,
        rest => x.saturating_add(multiple - rest),
    }
}

fn least_common_multiple(a: i64, b: i64) -> Result<i64> {
    let (mut x, mut y) = (a, b);
    while y != 0 {
        (x, y) = (y, x % y);
    }
    match (a / x).checked_mul(b).filter(|m| *m <= MAX_TOKENS) {
        Some(multiple) => Ok(multiple),
        None => plan_error!("padding to multiples of {a} and {b} together is more than {MAX_TOKENS} tokens"),
    }
}
