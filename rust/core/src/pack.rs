//! From planned rows to contiguous arrays: one micro-batch, on one context-parallel rank, into buffers of the caller.

use std::ops::Range;

use arrow_array::cast::AsArray;
use arrow_array::{Array, ArrowNativeTypeOp};

use crate::arrays::{with_integers, with_numbers};
use crate::carry::{carry, scalar};
use crate::check::{Faults, Row, is_one};
use crate::columns::Samples;
use crate::cut::Cut;
use crate::error::counted;
use crate::rows::Rows;
use crate::{Error, Result};

/// Stands where a position is not trained.
pub const IGNORED: i32 = -100;

/// The samples of one micro-batch as they were planned. None at all: a placeholder.
#[derive(Debug, Clone, Copy)]
pub struct Planned<'a> {
    pub rows: &'a [i64],
    pub total_lengths: &'a [i64],
    pub response_lengths: &'a [i64],
    pub mask_sums: &'a [i64],
}

/// How large a packed micro-batch is.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Size {
    /// S, 1 for a placeholder.
    pub samples: usize,
    /// T, on one rank.
    pub positions: usize,
    /// The longest padded sequence.
    pub max_seqlen: i64,
    starts: Vec<i64>,
}

/// The sequences of a micro-batch. A placeholder is one masked token.
const fn sequences(total_lengths: &[i64]) -> &[i64] {
    if total_lengths.is_empty() { &[1] } else { total_lengths }
}

/// What each micro-batch computes, over all its cp ranks: its positions, and the sum of squares of its sequences.
///
/// Both with padding: that at the end of a micro-batch belongs to its last sequence. `offsets`: where each micro-batch
/// begins among the samples, and the end.
pub fn work(total_lengths: &[i64], offsets: &[i64], cut: &Cut) -> Result<Vec<(i64, i64)>> {
    let of = |bounds: &[i64]| {
        let samples = total_lengths.get(bounds[0] as usize..bounds[1] as usize)?;
        let starts = cut.starts(sequences(samples));
        let squares = starts.windows(2).map(|w| (w[1] - w[0]).saturating_mul(w[1] - w[0]));
        Some((starts.last().copied().unwrap_or(0), squares.fold(0, i64::saturating_add)))
    };
    let outside =
        || Error::Input("offsets of micro-batches have to rise, and to end at the samples".to_owned());
    offsets.windows(2).map(|bounds| of(bounds).ok_or_else(outside)).collect()
}

impl Planned<'_> {
    pub fn size(&self, cut: &Cut) -> Size {
        let lengths = sequences(self.total_lengths);
        let starts = cut.starts(lengths);
        let end = starts.last().copied().unwrap_or(0);
        Size {
            samples: lengths.len(),
            positions: (end / cut.cp_size) as usize,
            max_seqlen: starts.windows(2).map(|w| w[1] - w[0]).max().unwrap_or(0),
            starts,
        }
    }
}

/// Where the packed arrays go, every element of which is written.
///
/// - `ints`: tokens, labels, `position_ids`, `segment_ids`, each T; `cu_seqlens`, `cu_seqlens_padded`, each S + 1
/// - `mask`: T
/// - `floats`: the token columns, each T, then the float sample columns, each S
/// - `doubles`: the other sample columns, each S
#[derive(Debug)]
pub struct Buffers<'a> {
    pub ints: &'a mut [i32],
    pub mask: &'a mut [bool],
    pub floats: &'a mut [f32],
    pub doubles: &'a mut [f64],
}

/// Packs the micro-batch `planned` as rank `cp_rank` holds it.
pub fn pack(
    rows: &Rows,
    planned: &Planned<'_>,
    cut: &Cut,
    cp_rank: i64,
    size: &Size,
    out: Buffers<'_>,
) -> Result<()> {
    let (samples, positions) = (size.samples, size.positions);
    let Buffers { ints, mask, floats, doubles } = out;
    let wanted = rows.buffer_lengths(size);
    if [ints.len(), mask.len(), floats.len(), doubles.len()] != wanted {
        return Err(Error::Input(format!("the buffers have to hold {wanted:?} values")));
    }
    let float_columns = rows.float_columns();
    let singles = float_columns.iter().filter(|f| **f).count();
    let (tokens, ints) = ints.split_at_mut(positions);
    let (labels, ints) = ints.split_at_mut(positions);
    let (position_ids, ints) = ints.split_at_mut(positions);
    let (segment_ids, ints) = ints.split_at_mut(positions);
    let (cu_seqlens, cu_seqlens_padded) = ints.split_at_mut(samples + 1);
    let (carried, sample_floats) = floats.split_at_mut(wanted[2] - singles * samples);
    let mut carried: Vec<&mut [f32]> = carried.chunks_mut(positions).collect();

    cu_seqlens[0] = 0;
    for (i, start) in size.starts.iter().enumerate() {
        cu_seqlens_padded[i] = *start as i32;
    }
    let found = planned.checked(rows)?;
    for (i, length) in planned.total_lengths.iter().enumerate() {
        cu_seqlens[i + 1] = cu_seqlens[i] + *length as i32;
    }
    if found.is_empty() {
        cu_seqlens[1] = 1;
    }
    let mut at = 0;
    for (segment, run) in cut.runs(&size.starts, cp_rank) {
        let here = at..at + (run.end - run.start) as usize;
        at = here.end;
        for (position, id) in (run.start as i32..).zip(&mut position_ids[here.clone()]) {
            *id = position;
        }
        let run = run.start as usize..run.end as usize;
        let mut part = Part {
            tokens: &mut tokens[here.clone()],
            labels: &mut labels[here.clone()],
            mask: &mut mask[here.clone()],
            segment_ids: &mut segment_ids[here.clone()],
        };
        match found.get(segment) {
            None => {
                part.placeholder(&run);
                for column in &mut carried {
                    column[here.clone()].fill(0.0);
                }
            }
            Some((batch, i, row)) => {
                part.sequence(batch, *i, row, &run, segment as i32)?;
                for (column, list) in carried.iter_mut().zip(&batch.token_columns) {
                    carry(list, batch.first_row + *i as i64, *i, row, &run, &mut column[here.clone()])?;
                }
            }
        }
    }
    let mut sample_floats = sample_floats.iter_mut();
    let mut sample_doubles = doubles.iter_mut();
    for (column, single) in float_columns.iter().enumerate() {
        for segment in 0..samples {
            let value = match found.get(segment) {
                Some((batch, i, _)) => scalar(&batch.sample_columns[column], batch.first_row, *i, *single)?,
                None => f64::NAN,
            };
            if *single {
                sample_floats.next().into_iter().for_each(|to| *to = value as f32);
            } else {
                sample_doubles.next().into_iter().for_each(|to| *to = value);
            }
        }
    }
    Ok(())
}

/// A planned row that was found: its batch, where in it, and what it holds.
type Found<'a> = (&'a Samples, usize, Row);

impl Planned<'_> {
    /// The rows, each with the lengths and the mask sum that were planned.
    fn checked<'a>(&self, rows: &'a Rows) -> Result<Vec<Found<'a>>> {
        let mut found = Vec::with_capacity(self.rows.len());
        for (n, row) in self.rows.iter().enumerate() {
            let Some((batch, i)) = rows.locate(*row) else {
                return Err(Error::Input(format!(
                    "row {row} was planned, and the data now has {}: it is not the data that was planned (a reader \
                     gives its rows only once: pass a table or a path)",
                    counted(rows.num_rows(), "row")
                )));
            };
            let mut faults = Faults::new(1);
            let Some(sample) = batch.check(i, &mut faults) else {
                let fault = faults.found.pop();
                return Err(fault.unwrap_or_else(|| Error::Input(format!("row {row} cannot be read"))));
            };
            let mask = batch.loss_mask.as_ref().map_or(batch.response_name(), |m| &m.name);
            for (column, what, planned, now) in [
                (batch.tokens.name.as_str(), "length", self.total_lengths[n], sample.total() as i64),
                (mask, "response length", self.response_lengths[n], sample.response as i64),
                (mask, "mask sum", self.mask_sums[n], sample.mask_sum),
            ] {
                if planned != now {
                    return Err(Error::data(
                        column,
                        *row,
                        format!(
                            "the {what} is {now}, and {planned} was planned: plan again from the data as it is now"
                        ),
                    ));
                }
            }
            found.push((batch, i, sample));
        }
        Ok(found)
    }
}

/// The part of each array that one run fills.
struct Part<'a> {
    tokens: &'a mut [i32],
    labels: &'a mut [i32],
    mask: &'a mut [bool],
    segment_ids: &'a mut [i32],
}

impl Part<'_> {
    /// A dummy sequence of one untrained token 0.
    fn placeholder(&mut self, run: &Range<usize>) {
        self.tokens.fill(0);
        self.labels.fill(IGNORED);
        self.mask.fill(false);
        self.segment_ids.fill(-1);
        if run.contains(&0) {
            self.segment_ids[0] = 0;
        }
    }

    /// Positions `run` of a padded sequence.
    fn sequence(
        &mut self,
        batch: &Samples,
        i: usize,
        row: &Row,
        run: &Range<usize>,
        segment: i32,
    ) -> Result<()> {
        let real = run.start.min(row.total())..run.end.min(row.total());
        self.segment_ids[..real.len()].fill(segment);
        self.segment_ids[real.len()..].fill(-1);

        let aligned = Aligned::new(row, run);
        self.mask[..aligned.to.start].fill(false);
        self.mask[aligned.to.end..].fill(false);
        let mask = &mut self.mask[aligned.to.clone()];
        match (&batch.loss_mask, &row.mask) {
            (Some(list), Some(range)) => {
                let from = range.start + aligned.from.start..range.start + aligned.from.end;
                let values = &list.values;
                with_numbers!(values, v => copy_mask(&v[from], mask), bits => {
                    for (to, bit) in mask.iter_mut().zip(&bits.slice(from.start, from.len())) {
                        *to = bit;
                    }
                });
            }
            _ => mask.fill(true),
        }

        let first = row.tokens.start;
        let next = first + row.prompt() + aligned.from.start..first + row.prompt() + aligned.from.end;
        let here = first + real.start..first + real.end;
        self.tokens[real.len()..].fill(0);
        self.labels[..aligned.to.start].fill(IGNORED);
        self.labels[aligned.to.end..].fill(IGNORED);
        let (tokens, labels) = (&mut self.tokens[..real.len()], &mut self.labels[aligned.to]);
        let values = &batch.tokens.values;
        let fits = with_integers!(
            values,
            v => copy_tokens(&v[here], tokens) & copy_labels(&v[next], mask, labels),
            _ => false
        );
        match if fits { None } else { batch.token_fault(i, row) } {
            None => Ok(()),
            Some(fault) => Err(fault),
        }
    }
}

/// What speaks of the token after a position: which positions of a run have a response token after them (`to`, within
/// the run), and which response tokens these are (`from`, within the response).
pub(crate) struct Aligned {
    pub to: Range<usize>,
    pub from: Range<usize>,
}

impl Aligned {
    pub fn new(row: &Row, run: &Range<usize>) -> Self {
        let (prompt, total) = (row.prompt(), row.total());
        let start = run.start.max(prompt.saturating_sub(1));
        let end = run.end.min(total - 1);
        if start >= end {
            return Self { to: 0..0, from: 0..0 };
        }
        Self { to: start - run.start..end - run.start, from: start + 1 - prompt..end + 1 - prompt }
    }
}

fn copy_mask<N: ArrowNativeTypeOp>(from: &[N], to: &mut [bool]) {
    for (to, x) in to.iter_mut().zip(from) {
        *to = is_one(*x);
    }
}

/// Returns whether all tokens fit.
fn copy_tokens<N: Copy + TryInto<i32>>(from: &[N], to: &mut [i32]) -> bool {
    let mut fits = true;
    for (to, x) in to.iter_mut().zip(from) {
        let token = (*x).try_into();
        fits &= token.is_ok();
        *to = token.unwrap_or(0);
    }
    fits
}

/// Returns whether all trained tokens fit and are not negative.
fn copy_labels<N: Copy + TryInto<i32>>(from: &[N], mask: &[bool], to: &mut [i32]) -> bool {
    let label = |x: N| x.try_into().unwrap_or(-1);
    // One negative label makes their union negative. In bits, for vector code of the oldest CPUs has no minimum.
    let mut union = 0;
    for ((to, x), trained) in to.iter_mut().zip(from).zip(mask) {
        let kept = -i32::from(*trained);
        let label = label(*x) & kept;
        union |= label;
        *to = label | (IGNORED & !kept);
    }
    union >= 0
}
