//! The samples of a plan in the order in which they are placed, a column for each thing that is known of them.

use std::sync::Arc;

use arrow_array::{ArrayRef, Float64Array, RecordBatch};
use arrow_buffer::ScalarBuffer;

use crate::Result;
use crate::ids::Numbered;
use crate::summary::{Summary, integers, without_nulls};

/// Ordered by (step, `dp_rank`, `micro_batch`, position). Columns that would say the same share their memory.
#[derive(Debug, Clone)]
pub struct Placed {
    pub row: ScalarBuffer<i64>,
    pub total_length: ScalarBuffer<i64>,
    pub response_length: ScalarBuffer<i64>,
    pub mask_sum: ScalarBuffer<i64>,
    pub rollout_mask_sum: ScalarBuffer<i64>,
    /// Under `prompt_mean` only.
    pub prompt_mask_sum: Option<ScalarBuffer<i64>>,
    /// Which rollout of the whole input, in first-seen order.
    pub rollout_index: ScalarBuffer<i64>,
    /// Which prompt group, under `prompt_mean` only.
    pub prompt_index: Option<ScalarBuffer<i64>>,
    pub sample_weight: ScalarBuffer<f64>,
}

/// What planning collects of the placed samples, step by step.
#[derive(Debug, Default)]
pub(crate) struct Placing {
    /// Which sample of the summary it is.
    pub sample: Vec<i64>,
    pub total_length: Vec<i64>,
    pub mask_sum: Vec<i64>,
    /// None where each row is a rollout: the mask sum of the sample.
    pub rollout_mask_sum: Option<Vec<i64>>,
    /// Under `prompt_mean` only.
    pub prompt_mask_sum: Option<Vec<i64>>,
    pub sample_weight: Vec<f64>,
}

/// The values of these samples.
pub(crate) fn of<'a, T: Copy>(samples: &'a [i64], values: &'a [T]) -> impl Iterator<Item = T> + 'a {
    samples.iter().map(|sample| values[*sample as usize])
}

impl Placing {
    pub fn finish(self, summary: &Summary, numbered: &Numbered) -> Placed {
        let sample = ScalarBuffer::from(self.sample);
        let mask_sum = ScalarBuffer::from(self.mask_sum);
        let units = |units: &[usize]| of(&sample, units).map(|unit| unit as i64).collect();
        let all_rows = summary.row.iter().zip(0..).all(|(row, sample)| *row == sample);
        Placed {
            row: if all_rows { sample.clone() } else { of(&sample, &summary.row).collect() },
            total_length: self.total_length.into(),
            response_length: of(&sample, &summary.response_length).collect(),
            rollout_mask_sum: self.rollout_mask_sum.map_or_else(|| mask_sum.clone(), Into::into),
            mask_sum,
            rollout_index: if summary.key.is_empty() { sample.clone() } else { units(&numbered.rollouts) },
            prompt_index: numbered.groups.as_deref().filter(|_| self.prompt_mask_sum.is_some()).map(units),
            prompt_mask_sum: self.prompt_mask_sum.map(Into::into),
            sample_weight: self.sample_weight.into(),
        }
    }
}

impl Placed {
    /// One row each sample. The last columns, from `response_length` on, are for packing.
    pub fn to_batch(&self) -> Result<RecordBatch> {
        let mut columns: Vec<(&str, ArrayRef)> = vec![
            ("row", integers(&self.row)),
            ("total_length", integers(&self.total_length)),
            ("mask_sum", integers(&self.mask_sum)),
            ("rollout_mask_sum", integers(&self.rollout_mask_sum)),
        ];
        columns.extend(self.prompt_mask_sum.as_ref().map(|sums| ("prompt_mask_sum", integers(sums))));
        columns.push(("sample_weight", Arc::new(Float64Array::new(self.sample_weight.clone(), None))));
        columns.push(("response_length", integers(&self.response_length)));
        columns.push(("rollout_index", integers(&self.rollout_index)));
        columns.extend(self.prompt_index.as_ref().map(|index| ("prompt_index", integers(index))));
        without_nulls(columns)
    }
}
