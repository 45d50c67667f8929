//! Columns made of arbitrary bytes, sound or not, go through the core and through a plain implementation of the same
//! rules. Both have to say the same: the same numbers, or an error.
//!
//! Buffers are as large as their types and lengths say, as they are where they come through the C data interface, and
//! what is in them is anything: offsets that run backwards or too far, keys without a value, wrong numbers of nulls.

mod make;
mod plain;

use std::sync::Arc;

use arbitrary::Unstructured;
use arrow_array::{ArrayRef, RecordBatch, RecordBatchOptions};
use arrow_schema::{Field, Schema};
use rollpack_core::arrays::show;
use rollpack_core::check::Faults;
use rollpack_core::columns::Request;
use rollpack_core::cut::{Cut, Layout};
use rollpack_core::pack::{Buffers, Planned, pack};
use rollpack_core::rows::Rows;
use rollpack_core::summary::summarize;

/// What planning and packing say of the data.
#[derive(Debug, Default, PartialEq)]
pub struct Answer {
    pub total: Vec<i64>,
    pub response: Vec<i64>,
    pub mask_sum: Vec<i64>,
    /// As text; none where each row is a rollout.
    pub ids: Vec<String>,
    /// Tokens, and whether the next one is trained, of all rows one behind the other; none where one cannot be packed.
    pub packed: Option<(Vec<i32>, Vec<bool>)>,
}

/// Makes columns of `bytes`, reads them in both ways, and panics where the answers differ. Returns whether they were
/// read rather than refused; nothing where the bytes did not suffice.
///
/// # Panics
/// If the core and the plain implementation disagree.
pub fn check(bytes: &[u8]) -> Option<bool> {
    let batches = make::batches(&mut Unstructured::new(bytes)).ok()?;
    let expected = plain::answer(&batches);
    let found = core_answer(&batches);
    assert_eq!(found, expected, "the core's answer, and the plain one, of {batches:#?}");
    Some(found.is_some())
}

fn core_answer(batches: &[make::Batch]) -> Option<Answer> {
    let batches: Vec<RecordBatch> = batches.iter().map(record).collect::<Option<_>>()?;
    let request = Request { rollout_key: vec!["rollout_id".to_owned()], ..Request::default() };
    let mut faults = Faults::new(1);
    let summary = summarize(batches.iter().cloned().map(Ok), &request, &mut faults).ok()?;
    if !faults.found.is_empty() {
        return None;
    }
    let ids = summary
        .key
        .first()
        .map_or(Vec::new(), |ids| (0..summary.len()).map(|i| show(&ids.values, i)).collect());
    let planned = Planned {
        rows: &summary.row,
        total_lengths: &summary.total_length,
        response_lengths: &summary.response_length,
        mask_sums: &summary.mask_sum,
    };
    let packed = packed(&batches, &planned);
    Some(Answer {
        total: summary.total_length.to_vec(),
        response: summary.response_length.to_vec(),
        mask_sum: summary.mask_sum.to_vec(),
        ids,
        packed,
    })
}

fn record(batch: &make::Batch) -> Option<RecordBatch> {
    let columns: Vec<(&str, ArrayRef)> = batch.columns();
    let fields: Vec<Field> =
        columns.iter().map(|(name, array)| Field::new(*name, array.data_type().clone(), true)).collect();
    let arrays = columns.into_iter().map(|(_, array)| array).collect();
    let options = RecordBatchOptions::new().with_row_count(Some(batch.num_rows));
    RecordBatch::try_new_with_options(Arc::new(Schema::new(fields)), arrays, &options).ok()
}

fn packed(batches: &[RecordBatch], planned: &Planned<'_>) -> Option<(Vec<i32>, Vec<bool>)> {
    let mut rows = Rows::default();
    for batch in batches {
        rows.push(Ok(batch.clone()), &Request::default()).ok()?;
    }
    let cut = Cut::new(1, Layout::Contiguous, 1, 1).ok()?;
    let size = planned.size(&cut);
    let [ints, masks, floats, doubles] = rows.buffer_lengths(&size);
    let (mut ints, mut mask) = (vec![-7; ints], vec![true; masks]);
    let (mut floats, mut doubles) = (vec![0.0; floats], vec![0.0; doubles]);
    let out = Buffers { ints: &mut ints, mask: &mut mask, floats: &mut floats, doubles: &mut doubles };
    pack(&rows, planned, &cut, 0, &size, out).ok()?;
    ints.truncate(size.positions);
    Some((ints, mask))
}

#[cfg(test)]
mod tests {
    /// The short form of the fuzzer: no coverage, a fixed seed. `ROLLPACK_FUZZ` is the number of inputs.
    #[test]
    fn the_core_says_what_a_plain_implementation_says() {
        let inputs = std::env::var("ROLLPACK_FUZZ").ok().and_then(|n| n.parse().ok()).unwrap_or(10_000_u64);
        let mut state = 0x9E37_79B9_7F4A_7C15_u64;
        let mut random = || {
            state ^= state << 13;
            state ^= state >> 7;
            state ^= state << 17;
            state
        };
        let (mut read, mut refused) = (0, 0);
        for _ in 0..inputs {
            let length = random() % 64 + 8;
            let bytes: Vec<u8> = (0..length).flat_map(|_| random().to_le_bytes()).collect();
            match super::check(&bytes) {
                Some(true) => read += 1,
                Some(false) => refused += 1,
                None => {}
            }
        }
        println!("{inputs} inputs: {read} read, {refused} refused");
        assert!(read > inputs / 50 && refused > inputs / 50, "{read} read, {refused} refused of {inputs}");
    }
}
