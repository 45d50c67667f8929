//! How long the core takes for bins and schedules, from arrays of lengths:
//! `cargo run --release -p rollpack-core --example speed`. The medians of nine runs.
//!
//! The largest come first: in a process that has worked, as Python's has, the allocator keeps the memory that a small run
//! asks for. Where it is new in each run, getting it is a quarter of the time of 8192 samples.

use std::time::Instant;

use rollpack_core::Result;
use rollpack_core::balance::{Limit, Shape, Sync, schedule};
use rollpack_core::bins::best_fit_decreasing;
use rollpack_core::cost::{Cost, CostModel};
use rollpack_core::cut::{Cut, Layout};
use rollpack_core::options::{Budget, Options};
use rollpack_core::plan::plan;
use rollpack_core::steps::{Remainder, StepSize};
use rollpack_core::summary::Summary;
use rollpack_core::weights::Mode;

const BUDGET: i64 = 32_768;

/// Nearly lognormal lengths, of median 2048 and sigma 1: the sum of twelve uniform numbers, less 6, is nearly normal.
fn lengths(n: usize) -> Vec<i64> {
    let mut state = 1u64;
    let mut uniform = || {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (state >> 33) as f64 / (1u64 << 31) as f64
    };
    let mut normal = || (0..12).map(|_| uniform()).sum::<f64>() - 6.0;
    (0..n).map(|_| ((2048.0 * normal().exp()) as i64).clamp(1, BUDGET)).collect()
}

fn milliseconds<T>(mut work: impl FnMut() -> T) -> (f64, T) {
    let mut timed = || {
        let begin = Instant::now();
        let result = work();
        (begin.elapsed().as_secs_f64() * 1e3, result)
    };
    let mut runs: Vec<_> = (0..9).map(|_| timed()).collect();
    runs.sort_by(|a, b| a.0.total_cmp(&b.0));
    runs.swap_remove(4)
}

fn options() -> Result<Options> {
    Ok(Options {
        mode: Mode::SampleMean,
        divisor: None,
        count_empty: true,
        budget: Budget::TokensPerGpu(BUDGET),
        dp_size: 1,
        cut: Cut::new(1, Layout::Zigzag, 1, 1)?,
        step_size: StepSize::Whole,
        remainder: Remainder::Error,
        oversize_alone: false,
        placeholders: false,
        micro_batch_multiple: 1,
        cost: CostModel::TOKENS,
        sync: Sync::Step,
        keep: None,
    })
}

fn main() -> Result<()> {
    for n in [524_288, 65_536, 8192, 1024] {
        let lengths = lengths(n);
        let bound = (lengths.iter().sum::<i64>() + BUDGET - 1) / BUDGET;
        let (ms, bins) = milliseconds(|| best_fit_decreasing(&lengths, BUDGET));
        println!("{n:>7} samples by budget: {ms:8.3} ms, {} bins over {bound}", bins.len() as i64 - bound);
    }
    for n in [524_288, 65_536] {
        let lengths = lengths(n);
        let zeros = vec![0; n];
        let summary = Summary {
            row: (0..n as i64).collect(),
            total_length: lengths.into(),
            response_length: zeros.clone().into(),
            mask_sum: zeros.into(),
            key: Vec::new(),
            group: Vec::new(),
            sources: Vec::new(),
            read: Vec::new(),
        };
        let (ms, planned) = milliseconds(|| plan(&summary, &options()?)?.placed.to_batch());
        println!("{:>7} samples as a plan:   {ms:8.3} ms", planned?.num_rows());
    }
    for (n, dp_size) in [(1024, 8), (1024, 32), (8192, 64)] {
        let lengths = lengths(n);
        let costs: Vec<Cost> = lengths.iter().map(|s| CostModel::ATTENTION.cost(*s)).collect();
        for sync in [Sync::Step, Sync::MicroBatch] {
            let shape =
                Shape { dp_size, limit: Limit::Tokens(BUDGET), multiple: 1, placeholders: false, sync };
            let (ms, scheduled) = milliseconds(|| schedule(0, &lengths, &costs, &shape));
            let k = scheduled?.len() / dp_size;
            println!("{n:>7} samples on {dp_size} ranks, {sync:?}: {ms:8.3} ms, {k} micro-batches each");
        }
    }
    Ok(())
}
