//! Batches that are held so that rows can be taken from them.

use arrow_array::RecordBatch;
use arrow_schema::ArrowError;

use crate::Result;
use crate::arrays::Scalars;
use crate::columns::{Request, Samples};
use crate::pack::Size;

/// Batches that rows are taken from. There may be gaps between them, of rows that nobody asks for.
#[derive(Debug, Clone, Default)]
pub struct Rows {
    batches: Vec<Samples>,
    num_rows: i64,
}

impl Rows {
    /// The rows of the next batch.
    pub fn push(
        &mut self,
        batch: std::result::Result<RecordBatch, ArrowError>,
        request: &Request,
    ) -> Result<()> {
        let samples = Samples::read(batch, request, self.num_rows)?;
        self.skip(samples.num_rows as i64);
        self.batches.push(samples);
        Ok(())
    }

    /// The rows of others. They share the memory.
    pub fn append(&mut self, others: &Self) {
        let moved = |b: &Samples| Samples { first_row: self.num_rows + b.first_row, ..b.clone() };
        self.batches.extend(others.batches.iter().map(moved));
        self.skip(others.num_rows);
    }

    /// The next rows are left out.
    pub fn skip(&mut self, num_rows: i64) {
        self.num_rows += num_rows;
    }

    /// Those that are held and those that were left out.
    pub fn num_rows(&self) -> i64 {
        self.num_rows
    }

    /// The batch that holds an input row, and where in it.
    pub(crate) fn locate(&self, row: i64) -> Option<(&Samples, usize)> {
        let after = self.batches.partition_point(|b| b.first_row <= row);
        let batch = self.batches.get(after.checked_sub(1)?)?;
        let i = usize::try_from(row - batch.first_row).ok()?;
        (i < batch.num_rows).then_some((batch, i))
    }

    /// Which sample columns travel as float32 (the others as float64), in the order of the request.
    pub fn float_columns(&self) -> Vec<bool> {
        let columns = self.batches.first().map_or(&[][..], |b| &b.sample_columns);
        columns.iter().map(Scalars::is_float).collect()
    }

    /// How many values each buffer of [`Buffers`](crate::pack::Buffers) holds, in its order.
    pub fn buffer_lengths(&self, size: &Size) -> [usize; 4] {
        let (samples, positions) = (size.samples, size.positions);
        let token_columns = self.batches.first().map_or(0, |b| b.token_columns.len());
        let floats = self.float_columns();
        let singles = floats.iter().filter(|f| **f).count();
        [
            4 * positions + 2 * (samples + 1),
            positions,
            token_columns * positions + singles * samples,
            (floats.len() - singles) * samples,
        ]
    }
}
