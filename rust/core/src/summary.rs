//! One small row a sample: what planning needs to know of the data, without its tokens.

use std::sync::Arc;

use arrow_array::cast::AsArray;
use arrow_array::types::Int64Type;
use arrow_array::{Array, ArrayRef, Int64Array, RecordBatch};
use arrow_buffer::ScalarBuffer;
use arrow_schema::ArrowError;

use crate::arrays::Ids;
use crate::check::{Faults, Row};
use crate::columns::{Request, Samples};
use crate::cut::MAX_TOKENS;
use crate::ids::{Grouping, IdColumn, Numbered};
use crate::{Error, Result};

/// The lengths, mask sums and ids of all samples, in input order.
#[derive(Debug, Clone)]
pub struct Summary {
    pub row: ScalarBuffer<i64>,
    pub total_length: ScalarBuffer<i64>,
    pub response_length: ScalarBuffer<i64>,
    pub mask_sum: ScalarBuffer<i64>,
    /// The rollout key, a column each part; none: each row is a rollout.
    pub key: Vec<Ids>,
    /// What tells prompt groups apart, a column each part; none: groups were not read.
    pub group: Vec<Ids>,
    /// Where the rows lie that were read apart and joined: the names of the sources and how many rows each has.
    pub sources: Vec<(String, i64)>,
    /// The columns of the data that were read; none where a summary came back from Arrow.
    pub read: Vec<String>,
}

/// Reads batches once. What is wrong goes to `faults`: rows with a fault are left out, and reading stops where
/// `faults` is full.
pub fn summarize(
    batches: impl Iterator<Item = std::result::Result<RecordBatch, ArrowError>>,
    request: &Request,
    faults: &mut Faults,
) -> Result<Summary> {
    request.validate()?;
    let mut lengths = Lengths::default();
    let mut grouping = Grouping::default();
    let mut read: Option<Vec<String>> = None;
    let mut key: Vec<(String, IdColumn)> = Vec::new();
    let mut group: Vec<(String, IdColumn)> = Vec::new();
    let mut first_row = 0;
    for batch in batches {
        let batch = batch.map_err(|e| Error::reading(&e))?;
        let Some(samples) = Samples::import(&batch, request, first_row, faults).filter(|_| !faults.is_full())
        else {
            break;
        };
        match &read {
            None => {
                let column = |ids: &Ids| (ids.name.clone(), IdColumn::default());
                key = samples.key.iter().map(column).collect();
                group = samples.group.iter().map(column).collect();
                read = Some(samples.names());
            }
            Some(names) if *names != samples.names() => {
                return Err(Error::Input(format!(
                    "the parts of the data have different columns: {} first, {} from row {first_row} on; give them one schema",
                    names.join(", "),
                    samples.names().join(", ")
                )));
            }
            Some(_) => {}
        }
        let numbered = if samples.group.is_some() {
            grouping.number(&samples.key, samples.group.as_slice(), samples.num_rows)?
        } else {
            grouping.same_types(&samples.key)?;
            Numbered::default()
        };
        lengths.reserve(samples.num_rows);
        let mut keep = Vec::with_capacity(samples.num_rows);
        for i in 0..samples.num_rows {
            let row = first_row + i as i64;
            let group = samples.group.as_slice();
            let one_group =
                grouping.one_group(&numbered, i, row, &samples.key, group, |r| format!("row {r}"));
            let checked = samples.check(i, faults);
            let kept = faults.keep(one_group).and(checked);
            if faults.is_full() {
                break;
            }
            keep.push(kept.is_some());
            if let Some(kept) = kept {
                lengths.push(row, &kept);
            }
        }
        // Also where reading stops here: every row of the summary has its ids.
        for ((_, column), ids) in
            key.iter_mut().chain(&mut group).zip(samples.key.iter().chain(&samples.group))
        {
            column.push(ids, &keep)?;
        }
        if faults.is_full() {
            break;
        }
        first_row += samples.num_rows as i64;
    }
    if first_row == 0 && faults.found.is_empty() {
        faults.push(Error::Input(
            "the data has no rows (a reader that was read before has none left: pass a table or a path)"
                .to_owned(),
        ));
    }
    let finish = |ids: Vec<(String, IdColumn)>| -> Result<Vec<Ids>> {
        ids.into_iter().map(|(name, column)| column.finish(name)).collect()
    };
    let (key, group) =
        if lengths.row.is_empty() { Default::default() } else { (finish(key)?, finish(group)?) };
    Ok(Summary {
        row: lengths.row.into(),
        total_length: lengths.total.into(),
        response_length: lengths.response.into(),
        mask_sum: lengths.mask_sum.into(),
        key,
        group,
        sources: Vec::new(),
        read: read.unwrap_or_default(),
    })
}

/// What is counted of each row.
#[derive(Debug, Default)]
struct Lengths {
    row: Vec<i64>,
    total: Vec<i64>,
    response: Vec<i64>,
    mask_sum: Vec<i64>,
}

impl Lengths {
    fn reserve(&mut self, rows: usize) {
        for column in [&mut self.row, &mut self.total, &mut self.response, &mut self.mask_sum] {
            column.reserve(rows);
        }
    }

    fn push(&mut self, row: i64, sample: &Row) {
        self.row.push(row);
        self.total.push(sample.total() as i64);
        self.response.push(sample.response as i64);
        self.mask_sum.push(sample.mask_sum);
    }
}

pub(crate) fn integers(values: &ScalarBuffer<i64>) -> ArrayRef {
    Arc::new(Int64Array::new(values.clone(), None))
}

/// A batch of these columns, which have no nulls.
pub(crate) fn without_nulls(columns: Vec<(&str, ArrayRef)>) -> Result<RecordBatch> {
    RecordBatch::try_from_iter_with_nullable(columns.into_iter().map(|(name, values)| (name, values, false)))
        .map_err(|e| Error::Input(e.to_string()))
}

/// A part of a longer key, kept apart from the summary's own columns.
fn key_name(part: &str) -> String {
    match part {
        "row" | "total_length" | "response_length" | "mask_sum" => format!("rollout_key.{part}"),
        _ => part.to_owned(),
    }
}

impl Summary {
    pub fn len(&self) -> usize {
        self.row.len()
    }

    pub fn is_empty(&self) -> bool {
        self.row.is_empty()
    }

    /// The names that the key columns take in [`Self::to_batch`]: their roles' names, whatever the data calls them,
    /// and `rollout_id` for a key of one part. Empty where each row is a rollout.
    pub fn key_names(&self, request: &Request) -> Vec<String> {
        match self.key.len() {
            0 => Vec::new(),
            1 => vec!["rollout_id".to_owned()],
            _ => request.rollout_key.iter().map(|part| key_name(part)).collect(),
        }
    }

    /// As Arrow: `row, total_length, response_length, mask_sum`, the parts of the rollout key and `group_index`.
    /// Where each row is a rollout, its `rollout_id` is its row.
    pub fn to_batch(&self, names: &[String]) -> Result<RecordBatch> {
        let mut columns = vec![
            ("row", integers(&self.row)),
            ("total_length", integers(&self.total_length)),
            ("response_length", integers(&self.response_length)),
            ("mask_sum", integers(&self.mask_sum)),
        ];
        if self.key.is_empty() {
            columns.push(("rollout_id", integers(&self.row)));
        }
        for (name, ids) in names.iter().zip(&self.key) {
            columns.push((name, Arc::clone(&ids.values)));
        }
        if let Some(ids) = self.group.first().filter(|_| !names.iter().any(|n| n == "group_index")) {
            columns.push(("group_index", Arc::clone(&ids.values)));
        }
        without_nulls(columns)
    }

    /// The inverse of [`Self::to_batch`]. `names` are the key columns in it, `groups` those that tell groups apart.
    pub fn from_batch(
        batch: &RecordBatch,
        names: &[String],
        groups: &[String],
        sources: Vec<(String, i64)>,
    ) -> Result<Self> {
        let column = |name: &str| -> Result<&ArrayRef> {
            batch.column_by_name(name).ok_or_else(|| Error::schema(name, "is missing from the summary"))
        };
        let integers = |name: &str| -> Result<ScalarBuffer<i64>> {
            let array = column(name)?;
            match array.as_primitive_opt::<Int64Type>().filter(|a| a.null_count() == 0) {
                Some(values) => Ok(values.values().clone()),
                None => Err(Error::schema(name, "has to be int64 without nulls in a summary")),
            }
        };
        let ids = |names: &[String]| -> Result<Vec<Ids>> {
            names.iter().map(|n| Ids::import(n, column(n)?, 0)).collect()
        };
        let summary = Self {
            row: integers("row")?,
            total_length: integers("total_length")?,
            response_length: integers("response_length")?,
            mask_sum: integers("mask_sum")?,
            key: ids(names)?,
            group: ids(groups)?,
            sources,
            read: Vec::new(),
        };
        summary.check()?;
        Ok(summary)
    }

    /// Where a row is, as a message says it.
    pub fn place(&self, row: i64) -> String {
        let mut first = 0;
        for (name, rows) in &self.sources {
            if (first..first + rows).contains(&row) {
                return format!("row {row} (row {} of source {name})", row - first);
            }
            first += rows;
        }
        format!("row {row}")
    }

    /// Says of a fault in which source it is.
    pub fn locate(&self, fault: Error) -> Error {
        match fault {
            Error::Data { column, row, message } if !self.sources.is_empty() => {
                Error::data(&column, row, format!("{message}. This is {}", self.place(row)))
            }
            other => other,
        }
    }

    /// A summary may come from a file or another process: what planning relies on is checked.
    fn check(&self) -> Result<()> {
        for (i, row) in self.row.iter().enumerate() {
            let (total, response, sum) = (self.total_length[i], self.response_length[i], self.mask_sum[i]);
            if !(0 <= sum && sum <= response && response <= total && (1..=MAX_TOKENS).contains(&total)) {
                return Err(Error::data(
                    "total_length",
                    *row,
                    format!(
                        "a sample of {total} tokens, {response} of them the response and {sum} of these trained, cannot be \
                         (and a sequence has at most {MAX_TOKENS} tokens)"
                    ),
                ));
            }
        }
        Ok(())
    }
}
