//! What the test files share: Arrow batches, summaries and options in few words.
#![allow(dead_code)] // each test file is a crate of its own and uses a part of this
#![allow(clippy::unwrap_used, clippy::panic)] // a test that cannot go on has failed

use std::sync::Arc;

use arrow_array::types::Int64Type;
use arrow_array::{Array, ArrayRef, Int64Array, ListArray, RecordBatch};
use arrow_schema::{Field, Schema};
use proptest::prelude::ProptestConfig;
use rollpack_core::Error;
use rollpack_core::arrays::Ids;
use rollpack_core::balance::Sync;
use rollpack_core::check::Faults;
use rollpack_core::columns::Request;
use rollpack_core::cost::CostModel;
use rollpack_core::cut::{Cut, Layout};
use rollpack_core::options::{Budget, Options};
use rollpack_core::steps::{Remainder, StepSize};
use rollpack_core::summary::{Summary, summarize};
use rollpack_core::weights::Mode;

/// `default` cases, or as many as `PROPTEST_CASES` says.
pub fn cases(default: u32) -> ProptestConfig {
    let mut config = ProptestConfig::default();
    if std::env::var_os("PROPTEST_CASES").is_none() {
        config.cases = default;
    }
    config.failure_persistence = None;
    config
}

pub fn batch(columns: Vec<(&str, ArrayRef)>) -> RecordBatch {
    let fields: Vec<_> = columns.iter().map(|(n, a)| Field::new(*n, a.data_type().clone(), true)).collect();
    let arrays = columns.into_iter().map(|(_, array)| array).collect();
    RecordBatch::try_new(Arc::new(Schema::new(fields)), arrays).unwrap()
}

/// A List column of int64.
pub fn lists(rows: &[&[i64]]) -> ArrayRef {
    nullable_lists(rows.iter().map(|row| Some(row.iter().map(|x| Some(*x)).collect())).collect())
}

pub fn nullable_lists(rows: Vec<Option<Vec<Option<i64>>>>) -> ArrayRef {
    Arc::new(ListArray::from_iter_primitive::<Int64Type, _, _>(rows))
}

pub fn int64(values: &[i64]) -> ArrayRef {
    Arc::new(Int64Array::from(values.to_vec()))
}

/// What the Python layer asks for by default.
pub fn request() -> Request {
    Request { rollout_key: vec!["rollout_id".to_owned()], ..Request::default() }
}

pub fn with_groups() -> Request {
    Request { groups: true, ..request() }
}

/// A request that maps roles to names; `None` takes the column as absent.
pub fn named(columns: &[(&str, Option<&str>)]) -> Request {
    let owned = |(role, name): &(&str, Option<&str>)| ((*role).to_owned(), name.map(str::to_owned));
    Request { columns: columns.iter().map(owned).collect(), ..request() }
}

/// All faults of the data, and the summary of the rows in order.
pub fn inspect(batches: &[RecordBatch], request: &Request) -> (Summary, Vec<Error>) {
    let mut faults = Faults::new(usize::MAX);
    let summary = summarize(batches.iter().cloned().map(Ok), request, &mut faults).unwrap();
    (summary, faults.found)
}

/// The first fault, or the summary.
pub fn read(batches: &[RecordBatch], request: &Request) -> Result<Summary, Error> {
    let mut faults = Faults::new(1);
    let summary = summarize(batches.iter().cloned().map(Ok), request, &mut faults)?;
    faults.found.pop().map_or(Ok(summary), Err)
}

/// The text of an error, which has to hold all of `parts`.
#[track_caller]
pub fn says<T>(result: Result<T, Error>, parts: &[&str]) -> Error {
    let Err(error) = result else { panic!("not refused; wanted an error that says {parts:?}") };
    let text = error.to_string();
    for part in parts {
        assert!(text.contains(part), "'{part}' is not in: {text}");
    }
    error
}

/// A `PlanError` whose text holds all of `parts`.
#[track_caller]
pub fn plan_error<T>(result: Result<T, Error>, parts: &[&str]) {
    let error = says(result, parts);
    assert!(matches!(error, Error::Plan(_)), "no PlanError: {error:?}");
}

/// A summary of rows that are rollouts of their own: (total length, mask sum).
pub fn rows(samples: &[(i64, i64)]) -> Summary {
    let column = |f: fn(&(i64, i64)) -> i64| samples.iter().map(f).collect();
    Summary {
        row: (0..samples.len() as i64).collect(),
        total_length: column(|s| s.0),
        response_length: column(|s| s.1),
        mask_sum: column(|s| s.1),
        key: Vec::new(),
        group: Vec::new(),
        sources: Vec::new(),
        read: Vec::new(),
    }
}

/// Rows of these lengths with every token but the first trained.
pub fn lengths(lengths: &[i64]) -> Summary {
    rows(&lengths.iter().map(|n| (*n, n - 1)).collect::<Vec<_>>())
}

pub fn ids(name: &str, values: &[i64]) -> Ids {
    Ids { name: name.to_owned(), values: int64(values) }
}

/// The summary with these rollouts and, where there are any, groups.
pub fn grouped(summary: Summary, rollouts: &[i64], groups: &[i64]) -> Summary {
    Summary {
        key: vec![ids("rollout_id", rollouts)],
        group: (!groups.is_empty()).then(|| ids("group_index", groups)).into_iter().collect(),
        ..summary
    }
}

pub fn cut(cp_size: i64, layout: Layout) -> Cut {
    Cut::new(cp_size, layout, 1, 1).unwrap()
}

/// The defaults of `rollpack.plan`, with `max_tokens_per_gpu`.
pub fn options(max_tokens_per_gpu: i64) -> Options {
    Options {
        mode: Mode::SampleMean,
        divisor: None,
        count_empty: true,
        budget: Budget::TokensPerGpu(max_tokens_per_gpu),
        dp_size: 1,
        cut: cut(1, Layout::Zigzag),
        step_size: StepSize::Whole,
        remainder: Remainder::Error,
        oversize_alone: false,
        placeholders: false,
        micro_batch_multiple: 1,
        cost: CostModel::TOKENS,
        sync: Sync::Step,
        keep: None,
    }
}

/// The least common multiple by trying.
pub fn lcm(a: i64, b: i64) -> i64 {
    (1..=b).map(|i| i * a).find(|m| m % b == 0).unwrap()
}

/// The next multiple, by trying.
pub fn up(x: i64, multiple: i64) -> i64 {
    (x..x + multiple).find(|y| y % multiple == 0).unwrap()
}
