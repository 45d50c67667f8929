//! The binding: takes Arrow in, releases the GIL, calls the core, hands numpy and Arrow out. It has no rule of its own.

mod import;
mod run;

use std::collections::BTreeMap;

use arrow_array::RecordBatch;
use import::Stream;
use numpy::{PyArray1, PyReadonlyArray1, PyReadwriteArray1, ToPyArray};
use pyo3::prelude::*;
use pyo3_arrow::PyRecordBatch;
use rollpack_core::balance::Sync;
use rollpack_core::check::Faults;
use rollpack_core::columns;
use rollpack_core::cost::CostModel;
use rollpack_core::cut::{Cut, Layout};
use rollpack_core::keep::Keep;
use rollpack_core::online::{self, Round};
use rollpack_core::options::{Budget, Options, count_empty, oversize_alone, shape};
use rollpack_core::pack::{self, Buffers, Planned, Size};
use rollpack_core::plan;
use rollpack_core::rows;
use rollpack_core::steps::{Remainder, StepSize};
use rollpack_core::summary::{self, Summary};
use rollpack_core::weights::{self, Mode, Totals};
use rollpack_core::{Error, Result};
use run::{raise, released};

/// What to read, as `rollpack._sources.Request` says it.
#[derive(FromPyObject)]
struct Request {
    columns: BTreeMap<String, Option<String>>,
    rollout_key: Vec<String>,
    groups: bool,
    token_columns: Vec<String>,
    sample_columns: Vec<String>,
}

impl From<Request> for columns::Request {
    fn from(r: Request) -> Self {
        Self {
            columns: r.columns.into_iter().collect(),
            rollout_key: r.rollout_key,
            groups: r.groups,
            token_columns: r.token_columns,
            sample_columns: r.sample_columns,
        }
    }
}

/// (kind, column, row, message)
type Fault = (&'static str, Option<String>, Option<i64>, String);

/// A summary, the names of its key columns, the columns that were read, and at most `limit` faults.
type Read = (RecordBatch, Vec<String>, Vec<String>, Faults);

fn read(py: Python<'_>, data: Vec<Stream>, request: Request, limit: usize) -> PyResult<Read> {
    released(py, move || {
        let request = columns::Request::from(request);
        let mut faults = Faults::new(limit);
        let summary = summary::summarize(data.into_iter().flatten(), &request, &mut faults)?;
        let key = summary.key_names(&request);
        Ok((summary.to_batch(&key)?, key, summary.read, faults))
    })
}

/// The summary as a `pyarrow.RecordBatch`, the names of its key columns, and the columns of the data that were read.
#[pyfunction]
fn summarize(
    py: Python<'_>,
    data: Vec<Stream>,
    request: Request,
) -> PyResult<(Bound<'_, PyAny>, Vec<String>, Vec<String>)> {
    let (batch, key, columns, mut faults) = read(py, data, request, 1)?;
    match faults.found.pop() {
        Some(fault) => Err(raise(py, &fault)),
        None => Ok((PyRecordBatch::new(batch).into_pyarrow(py)?, key, columns)),
    }
}

/// The summary of the rows in order, the names of its key columns, and all faults.
#[pyfunction]
fn inspect(
    py: Python<'_>,
    data: Vec<Stream>,
    request: Request,
) -> PyResult<(Bound<'_, PyAny>, Vec<String>, Vec<Fault>)> {
    let (batch, key, _, faults) = read(py, data, request, usize::MAX)?;
    let describe = |fault: Error| match fault {
        Error::Schema { column, message } => ("schema", Some(column), None, message),
        Error::Data { column, row, message } => ("data", Some(column), Some(row), message),
        Error::Input(message) | Error::Plan(message) => ("input", None, None, message),
    };
    Ok((PyRecordBatch::new(batch).into_pyarrow(py)?, key, faults.found.into_iter().map(describe).collect()))
}

/// Paddings and the cut over cp ranks: (`cp_size`, `layout`, `pad_to_multiple_of`, `pad_micro_batch_to_multiple_of`).
type CutArguments = (i64, String, i64, i64);

fn cut(py: Python<'_>, arguments: &CutArguments) -> PyResult<Cut> {
    let (cp_size, layout, sequence, micro_batch) = arguments;
    let layout = Layout::parse(layout).map_err(|e| raise(py, &e))?;
    Cut::new(*cp_size, layout, *sequence, *micro_batch).map_err(|e| raise(py, &e))
}

#[derive(FromPyObject)]
struct PlanArguments {
    loss_aggregation: String,
    divisor: Option<f64>,
    empty: String,
    max_tokens_per_gpu: Option<i64>,
    micro_batch_size: Option<i64>,
    dp_size: i64,
    global_batch_size: Option<i64>,
    prompts_per_step: Option<i64>,
    remainder: String,
    oversize: String,
    placeholders: bool,
    micro_batch_multiple: i64,
    cost: (u64, u64),
    sync: String,
    keep_together: Option<String>,
}

impl PlanArguments {
    fn options(&self, cut: Cut) -> Result<Options> {
        Ok(Options {
            mode: Mode::parse(&self.loss_aggregation)?,
            divisor: self.divisor,
            count_empty: count_empty(&self.empty)?,
            budget: Budget::of(self.max_tokens_per_gpu, self.micro_batch_size)?,
            dp_size: self.dp_size,
            cut,
            step_size: StepSize::of(self.global_batch_size, self.prompts_per_step)?,
            remainder: Remainder::parse(&self.remainder)?,
            oversize_alone: oversize_alone(&self.oversize)?,
            placeholders: self.placeholders,
            micro_batch_multiple: self.micro_batch_multiple,
            cost: CostModel::new(self.cost.0, self.cost.1)?,
            sync: Sync::parse(&self.sync)?,
            keep: self.keep_together.as_deref().map(Keep::parse).transpose()?,
        })
    }
}

/// What `rollpack.planning` wraps: arrays, counts and two ratios.
#[pyclass(frozen, get_all)]
struct Planning {
    placements: Py<PyAny>,
    offsets: Py<PyArray1<i64>>,
    /// Per step: `num_rollouts`, `num_prompts` or None, `num_tokens`, `num_micro_batches`.
    steps: Vec<(i64, Option<i64>, i64, i64)>,
    dropped_rows: Py<PyArray1<i64>>,
    oversize_rows: Py<PyArray1<i64>>,
    fill: f64,
    imbalance: f64,
}

/// The arguments of a plan, checked before any data is read.
#[pyclass(frozen, name = "Options")]
struct PlanOptions(Options);

#[pymethods]
impl PlanOptions {
    #[new]
    fn new(py: Python<'_>, arguments: PlanArguments, cut_arguments: CutArguments) -> PyResult<Self> {
        let cut = cut(py, &cut_arguments)?;
        let options = arguments.options(cut).and_then(|o| shape(&o).map(|_| o));
        options.map(Self).map_err(|e| raise(py, &e))
    }
}

#[pyfunction(name = "plan")]
fn make_plan(
    py: Python<'_>,
    summary: PyRecordBatch,
    key: Vec<String>,
    groups: Vec<String>,
    sources: Vec<(String, i64)>,
    options: &PlanOptions,
) -> PyResult<Planning> {
    let (plan, batch) = released(py, move || {
        let summary = Summary::from_batch(&summary.into_inner(), &key, &groups, sources)?;
        let plan = plan::plan(&summary, &options.0)?;
        let batch = plan.placed.to_batch()?;
        Ok((plan, batch))
    })?;
    let counts = |s: &plan::Step| (s.num_rollouts, s.num_prompts, s.num_tokens, s.num_micro_batches);
    Ok(Planning {
        placements: PyRecordBatch::new(batch).into_pyarrow(py)?.unbind(),
        offsets: plan.offsets.to_pyarray(py).unbind(),
        steps: plan.steps.iter().map(counts).collect(),
        dropped_rows: plan.dropped_rows.to_pyarray(py).unbind(),
        oversize_rows: plan.oversize_rows.to_pyarray(py).unbind(),
        fill: plan.fill,
        imbalance: plan.imbalance,
    })
}

/// Samples of a step that is arriving, which wait until they can go out.
#[pyclass]
struct Online(online::Online);

#[pymethods]
impl Online {
    #[new]
    fn new(py: Python<'_>, options: &PlanOptions, look_ahead: i64) -> PyResult<Self> {
        online::Online::new(options.0, look_ahead).map(Self).map_err(|e| raise(py, &e))
    }

    /// The rounds that can go out: rank, micro-batch, samples, numbered as they came in this step.
    fn add(
        &mut self,
        py: Python<'_>,
        rows: PyReadonlyArray1<'_, i64>,
        total_lengths: PyReadonlyArray1<'_, i64>,
    ) -> PyResult<Vec<Round>> {
        let (rows, lengths) = (rows.as_slice()?, total_lengths.as_slice()?);
        released(py, || self.0.add(rows, lengths))
    }

    /// What still waits at the end of a step.
    fn finish(&mut self, py: Python<'_>, step: usize) -> PyResult<Round> {
        released(py, || self.0.finish(step))
    }
}

/// Rows that micro-batches are packed from, held as Arrow.
#[pyclass(frozen)]
struct Rows(rows::Rows);

/// The planned side of one micro-batch: rows, total lengths, response lengths, mask sums.
type PlannedArrays<'py> = [PyReadonlyArray1<'py, i64>; 4];

fn slices<'a>(arrays: &'a PlannedArrays<'_>) -> PyResult<Planned<'a>> {
    let [rows, total, response, sums] = arrays;
    Ok(Planned {
        rows: rows.as_slice()?,
        total_lengths: total.as_slice()?,
        response_lengths: response.as_slice()?,
        mask_sums: sums.as_slice()?,
    })
}

#[pymethods]
impl Rows {
    /// `gaps`: the rows that are left out before each stream of `data`, and behind the last.
    #[new]
    fn new(py: Python<'_>, data: Vec<Stream>, request: Request, gaps: Vec<i64>) -> PyResult<Self> {
        released(py, move || {
            let request = request.into();
            let mut rows = rows::Rows::default();
            let mut data = data.into_iter();
            for gap in gaps {
                rows.skip(gap);
                for batch in data.by_ref().take(1).flatten() {
                    rows.push(batch, &request)?;
                }
            }
            Ok(Self(rows))
        })
    }

    /// The rows of several, with so many rows left out before each.
    #[staticmethod]
    fn joined(parts: Vec<PyRef<'_, Self>>, gaps: Vec<i64>) -> Self {
        let mut rows = rows::Rows::default();
        for (part, gap) in parts.iter().zip(gaps) {
            rows.skip(gap);
            rows.append(&part.0);
        }
        Self(rows)
    }

    #[getter]
    fn num_rows(&self) -> i64 {
        self.0.num_rows()
    }

    /// Which sample columns travel as float32.
    #[getter]
    fn float_columns(&self) -> Vec<bool> {
        self.0.float_columns()
    }

    /// (S, T, `max_seqlen`, lengths of the four buffers) of a micro-batch.
    fn size(
        &self,
        py: Python<'_>,
        planned: PlannedArrays<'_>,
        cut_arguments: CutArguments,
    ) -> PyResult<(usize, usize, i64, [usize; 4])> {
        let size: Size = slices(&planned)?.size(&cut(py, &cut_arguments)?);
        Ok((size.samples, size.positions, size.max_seqlen, self.0.buffer_lengths(&size)))
    }

    /// Fills the four buffers.
    #[allow(clippy::too_many_arguments)] // one a buffer
    fn pack(
        &self,
        py: Python<'_>,
        planned: PlannedArrays<'_>,
        cut_arguments: CutArguments,
        cp_rank: i64,
        mut ints: PyReadwriteArray1<'_, i32>,
        mut mask: PyReadwriteArray1<'_, bool>,
        mut floats: PyReadwriteArray1<'_, f32>,
        mut doubles: PyReadwriteArray1<'_, f64>,
    ) -> PyResult<()> {
        let cut = cut(py, &cut_arguments)?;
        let planned = slices(&planned)?;
        let out = Buffers {
            ints: ints.as_slice_mut()?,
            mask: mask.as_slice_mut()?,
            floats: floats.as_slice_mut()?,
            doubles: doubles.as_slice_mut()?,
        };
        released(py, move || pack::pack(&self.0, &planned, &cut, cp_rank, &planned.size(&cut), out))
    }
}

type Ints<'py> = Bound<'py, PyArray1<i64>>;

/// Positions and sums of squared lengths, [micro-batches] each, with padding and over all cp ranks.
#[pyfunction]
fn work<'py>(
    py: Python<'py>,
    total_lengths: PyReadonlyArray1<'py, i64>,
    offsets: PyReadonlyArray1<'py, i64>,
    cut_arguments: CutArguments,
) -> PyResult<(Ints<'py>, Ints<'py>)> {
    let (lengths, offsets) = (total_lengths.as_slice()?, offsets.as_slice()?);
    let cut = cut(py, &cut_arguments)?;
    let (positions, squares): (Vec<i64>, Vec<i64>) =
        released(py, || pack::work(lengths, offsets, &cut))?.into_iter().unzip();
    Ok((positions.to_pyarray(py), squares.to_pyarray(py)))
}

#[pyfunction]
#[allow(clippy::too_many_arguments)] // the public signature
fn sample_weights<'py>(
    py: Python<'py>,
    loss_aggregation: &str,
    num_samples: usize,
    rollout_mask_sums: Option<PyReadonlyArray1<'py, i64>>,
    prompt_mask_sums: Option<PyReadonlyArray1<'py, i64>>,
    num_rollouts: Option<i64>,
    num_prompts: Option<i64>,
    num_tokens: Option<i64>,
    divisor: Option<f64>,
) -> PyResult<Bound<'py, PyArray1<f64>>> {
    let rollouts = rollout_mask_sums.as_ref().map(PyReadonlyArray1::as_slice).transpose()?;
    let prompts = prompt_mask_sums.as_ref().map(PyReadonlyArray1::as_slice).transpose()?;
    let totals = Totals { num_rollouts, num_prompts, num_tokens, num_micro_batches: None, divisor };
    Mode::parse(loss_aggregation)
        .and_then(|mode| weights::sample_weights(mode, num_samples, rollouts, prompts, None, &totals))
        .map(|w| w.to_pyarray(py))
        .map_err(|e| raise(py, &e))
}

// Nothing here relies on the GIL: what Python shares is frozen, or borrowed for a call.
#[pymodule(gil_used = false)]
mod _core {
    /// Whether this is a debug build.
    #[pymodule_export]
    const DEBUG: bool = cfg!(debug_assertions);

    #[pymodule_export]
    use super::{Online, PlanOptions, Planning, Rows, inspect, make_plan, sample_weights, summarize, work};
}
