//! From rows to arrays, against a plain restatement of the design, position by position.
#![allow(clippy::unwrap_used, clippy::panic)] // a test that cannot go on has failed

mod common;

use std::sync::Arc;

use arrow_array::types::{Float32Type, Float64Type, UInt64Type};
use arrow_array::{
    ArrayRef, BooleanArray, Float32Array, Float64Array, Int64Array, ListArray, NullArray, RecordBatch,
    StringArray,
};
use arrow_schema::{DataType, Field};
use common::{batch, cases, cut, int64, lcm, lists, nullable_lists, read, request, says, up};
use proptest::prelude::*;
use rollpack_core::columns::Request;
use rollpack_core::cut::{Cut, Layout};
use rollpack_core::pack::{Buffers, Planned, pack, work};
use rollpack_core::rows::Rows;
use rollpack_core::{Error, Result};

/// What a rank's micro-batch holds.
#[derive(Debug, Clone, PartialEq, Default)]
struct Packed {
    tokens: Vec<i32>,
    labels: Vec<i32>,
    position_ids: Vec<i32>,
    segment_ids: Vec<i32>,
    loss_mask: Vec<bool>,
    columns: Vec<Vec<f32>>,
    cu_seqlens: Vec<i32>,
    cu_seqlens_padded: Vec<i32>,
    max_seqlen: i64,
    floats: Vec<Vec<f32>>,
    doubles: Vec<Vec<f64>>,
}

/// The planned side of some rows, as a summary has it.
#[derive(Debug, Clone)]
struct Lengths {
    rows: Vec<i64>,
    total: Vec<i64>,
    response: Vec<i64>,
    sums: Vec<i64>,
}

impl Lengths {
    fn planned(&self) -> Planned<'_> {
        Planned {
            rows: &self.rows,
            total_lengths: &self.total,
            response_lengths: &self.response,
            mask_sums: &self.sums,
        }
    }
}

/// What is planned for these rows of the data.
fn planned(batches: &[RecordBatch], request: &Request, rows: &[i64]) -> Lengths {
    let summary = read(batches, request).unwrap();
    let of = |column: &[i64]| rows.iter().map(|r| column[*r as usize]).collect();
    Lengths {
        rows: rows.to_vec(),
        total: of(&summary.total_length),
        response: of(&summary.response_length),
        sums: of(&summary.mask_sum),
    }
}

fn source(batches: &[RecordBatch], request: &Request) -> Result<Rows> {
    let mut rows = Rows::default();
    for batch in batches {
        rows.push(Ok(batch.clone()), request)?;
    }
    Ok(rows)
}

fn filled(rows: &Rows, lengths: &Lengths, cut: &Cut, rank: i64) -> Result<Packed> {
    let planned = lengths.planned();
    let size = planned.size(cut);
    let [ints, mask, floats, doubles] = rows.buffer_lengths(&size);
    // Poison: what is not written shows.
    let (mut ints, mut floats, mut doubles) = (vec![-777; ints], vec![-777.0; floats], vec![-777.0; doubles]);
    let packed = |mut mask: Vec<bool>, ints: &mut [i32], floats: &mut [f32], doubles: &mut [f64]| {
        pack(rows, &planned, cut, rank, &size, Buffers { ints, mask: &mut mask, floats, doubles })
            .map(|()| mask)
    };
    let loss_mask = packed(vec![true; mask], &mut ints, &mut floats, &mut doubles)?;
    assert_eq!(packed(vec![false; mask], &mut ints, &mut floats, &mut doubles)?, loss_mask);

    let (positions, samples) = (size.positions, size.samples);
    let singles = rows.float_columns().iter().filter(|f| **f).count();
    let (carried, sample_floats) = floats.split_at(floats.len() - singles * samples);
    let per_position: Vec<Vec<i32>> = ints[..4 * positions].chunks(positions).map(<[i32]>::to_vec).collect();
    let bounds = &ints[4 * positions..];
    Ok(Packed {
        tokens: per_position[0].clone(),
        labels: per_position[1].clone(),
        position_ids: per_position[2].clone(),
        segment_ids: per_position[3].clone(),
        loss_mask,
        columns: carried.chunks(positions).map(<[f32]>::to_vec).collect(),
        cu_seqlens: bounds[..=samples].to_vec(),
        cu_seqlens_padded: bounds[samples + 1..].to_vec(),
        max_seqlen: size.max_seqlen,
        floats: sample_floats.chunks(samples).map(<[f32]>::to_vec).collect(),
        doubles: doubles.chunks(samples).map(<[f64]>::to_vec).collect(),
    })
}

fn packed_with(
    batches: &[RecordBatch],
    request: &Request,
    rows: &[i64],
    cut: &Cut,
    rank: i64,
) -> Result<Packed> {
    filled(&source(batches, request)?, &planned(batches, &plain(request), rows), cut, rank)
}

/// The request without the columns that are carried, for summarizing.
fn plain(request: &Request) -> Request {
    Request { token_columns: vec![], sample_columns: vec![], ..request.clone() }
}

fn carrying(token_columns: &[&str], sample_columns: &[&str]) -> Request {
    let owned = |names: &[&str]| names.iter().map(|n| (*n).to_owned()).collect();
    Request { token_columns: owned(token_columns), sample_columns: owned(sample_columns), ..request() }
}

fn f32_lists(rows: &[&[f32]]) -> ArrayRef {
    let rows = rows.iter().map(|r| Some(r.iter().copied().map(Some).collect::<Vec<_>>()));
    Arc::new(ListArray::from_iter_primitive::<Float32Type, _, _>(rows))
}

// By hand

/// Prompt 11 12, response 13 14 15 with mask 1 0 1; prompt 21, response 22.
fn two() -> RecordBatch {
    batch(vec![
        ("tokens", lists(&[&[11, 12, 13, 14, 15], &[21, 22]])),
        ("loss_mask", lists(&[&[1, 0, 1], &[1]])),
        ("logprobs", f32_lists(&[&[0.1, 0.2, 0.3], &[0.4]])),
        ("reward", Arc::new(Float32Array::from(vec![1.5, -2.5]))),
        ("turn", int64(&[3, 1 << 40])),
    ])
}

fn two_carrying() -> Request {
    carrying(&["logprobs"], &["reward", "turn"])
}

#[test]
fn one_rank_by_hand() {
    let packed = packed_with(&[two()], &two_carrying(), &[0, 1], &cut(1, Layout::Zigzag), 0).unwrap();
    let expected = Packed {
        tokens: vec![11, 12, 13, 14, 15, 21, 22],
        labels: vec![-100, 13, -100, 15, -100, 22, -100],
        position_ids: vec![0, 1, 2, 3, 4, 0, 1],
        segment_ids: vec![0, 0, 0, 0, 0, 1, 1],
        loss_mask: vec![false, true, false, true, false, true, false],
        columns: vec![vec![0.0, 0.1, 0.2, 0.3, 0.0, 0.4, 0.0]],
        cu_seqlens: vec![0, 5, 7],
        cu_seqlens_padded: vec![0, 5, 7],
        max_seqlen: 5,
        floats: vec![vec![1.5, -2.5]],
        doubles: vec![vec![3.0, (1i64 << 40) as f64]],
    };
    assert_eq!(packed, expected);
}

#[test]
fn two_zigzag_ranks_by_hand() {
    // 5 becomes 8 in chunks of 2, 2 becomes 4 in chunks of 1. Rank 0 has the outer chunks.
    let both = [0, 1]
        .map(|rank| packed_with(&[two()], &two_carrying(), &[0, 1], &cut(2, Layout::Zigzag), rank).unwrap());
    assert_eq!(both[0].tokens, [11, 12, 0, 0, 21, 0]);
    assert_eq!(both[0].labels, [-100, 13, -100, -100, 22, -100]);
    assert_eq!(both[0].position_ids, [0, 1, 6, 7, 0, 3]);
    assert_eq!(both[0].segment_ids, [0, 0, -1, -1, 1, -1]);
    assert_eq!(both[0].columns, [[0.0, 0.1, 0.0, 0.0, 0.4, 0.0]]);
    assert_eq!(both[1].tokens, [13, 14, 15, 0, 22, 0]);
    assert_eq!(both[1].labels, [-100, 15, -100, -100, -100, -100]);
    assert_eq!(both[1].position_ids, [2, 3, 4, 5, 1, 2]);
    assert_eq!(both[1].segment_ids, [0, 0, 0, -1, 1, -1]);
    assert_eq!(both[1].columns, [[0.2, 0.3, 0.0, 0.0, 0.0, 0.0]]);
    for rank in both {
        assert_eq!((rank.cu_seqlens, rank.cu_seqlens_padded), (vec![0, 5, 7], vec![0, 8, 12]));
        assert_eq!(rank.max_seqlen, 8);
        assert_eq!(rank.floats, [[1.5, -2.5]]);
    }
}

#[test]
fn two_contiguous_ranks_by_hand() {
    // 7 becomes 8; the padding is of the last sequence.
    let both = [0, 1].map(|rank| {
        packed_with(&[two()], &two_carrying(), &[0, 1], &cut(2, Layout::Contiguous), rank).unwrap()
    });
    assert_eq!(both[0].tokens, [11, 12, 13, 14]);
    assert_eq!(both[0].labels, [-100, 13, -100, 15]);
    assert_eq!(both[1].tokens, [15, 21, 22, 0]);
    assert_eq!(both[1].labels, [-100, 22, -100, -100]);
    assert_eq!(both[1].position_ids, [4, 0, 1, 2]);
    assert_eq!(both[1].segment_ids, [0, 1, 1, -1]);
    assert_eq!(both[1].cu_seqlens_padded, [0, 5, 8]);
    assert_eq!(both[1].max_seqlen, 5);
}

#[test]
fn a_response_over_the_whole_sequence() {
    let data = batch(vec![("tokens", lists(&[&[1, 2, 3]])), ("loss_mask", lists(&[&[0, 1, 1]]))]);
    let packed = packed_with(&[data], &request(), &[0], &cut(1, Layout::Zigzag), 0).unwrap();
    assert_eq!(packed.labels, [2, 3, -100]);
    assert_eq!(packed.loss_mask, [true, true, false]);
}

#[test]
fn an_empty_response_trains_nothing() {
    let data = batch(vec![("tokens", lists(&[&[1, 2], &[3]])), ("response_length", int64(&[0, 0]))]);
    let packed = packed_with(&[data], &request(), &[0, 1], &cut(1, Layout::Zigzag), 0).unwrap();
    assert_eq!(packed.labels, [-100; 3]);
    assert_eq!(packed.loss_mask, [false; 3]);
}

#[test]
fn without_a_mask_every_response_token_is_trained() {
    let data = batch(vec![("tokens", lists(&[&[1, 2, 3, 4]])), ("response_length", int64(&[2]))]);
    let packed = packed_with(&[data], &request(), &[0], &cut(1, Layout::Zigzag), 0).unwrap();
    assert_eq!(packed.labels, [-100, 3, 4, -100]);
    assert_eq!(packed.loss_mask, [false, true, true, false]);
}

#[test]
fn a_placeholder_is_one_masked_token() {
    let none = Lengths { rows: vec![], total: vec![], response: vec![], sums: vec![] };
    let rows = source(&[two()], &two_carrying()).unwrap();
    let packed = |cut: Cut, rank| {
        let packed = filled(&rows, &none, &cut, rank).unwrap();
        assert!(packed.loss_mask.iter().all(|m| !m));
        assert!(packed.labels.iter().all(|l| *l == -100));
        assert!(packed.tokens.iter().all(|t| *t == 0));
        assert!(packed.columns.iter().flatten().all(|x| *x == 0.0), "{:?}", packed.columns);
        assert!(packed.floats[0].iter().all(|x| x.is_nan()) && packed.floats[0].len() == 1);
        assert!(packed.doubles[0].iter().all(|x| x.is_nan()) && packed.doubles[0].len() == 1);
        assert_eq!(packed.cu_seqlens, [0, 1]);
        packed
    };
    let one = packed(cut(1, Layout::Zigzag), 0);
    assert_eq!((one.segment_ids, one.position_ids, one.cu_seqlens_padded), (vec![0], vec![0], vec![0, 1]));
    let first = packed(cut(2, Layout::Zigzag), 0);
    assert_eq!((first.segment_ids, first.position_ids), (vec![0, -1], vec![0, 3]));
    let second = packed(cut(2, Layout::Zigzag), 1);
    assert_eq!((second.segment_ids, second.position_ids), (vec![-1, -1], vec![1, 2]));
    assert_eq!((second.cu_seqlens_padded, second.max_seqlen), (vec![0, 4], 4));
    let last = packed(Cut::new(2, Layout::Contiguous, 1, 6).unwrap(), 1);
    assert_eq!((last.segment_ids, last.position_ids), (vec![-1; 3], vec![3, 4, 5]));
}

#[test]
fn rows_are_found_across_batches() {
    let whole = two();
    let empty = whole.slice(0, 0);
    let parts =
        [empty.clone(), whole.slice(0, 1), empty.clone(), whole.slice(1, 1), empty.clone(), whole, empty];
    for (rows, tokens) in [
        (vec![1, 2], vec![21, 22, 11, 12, 13, 14, 15]),
        (vec![3, 1], vec![21, 22, 21, 22]), // any rows in any order
    ] {
        let packed = packed_with(&parts, &request(), &rows, &cut(1, Layout::Zigzag), 0).unwrap();
        assert_eq!(packed.tokens, tokens);
    }
    assert_eq!(source(&parts, &request()).unwrap().num_rows(), 4);
}

// Data that is not what was planned

#[test]
fn a_changed_row_is_refused() {
    let before = planned(&[two()], &request(), &[0, 1]);
    let changed = |tokens: &[&[i64]], mask: &[&[i64]]| {
        let data = batch(vec![("tokens", lists(tokens)), ("loss_mask", lists(mask))]);
        let result = filled(&source(&[data], &request()).unwrap(), &before, &cut(1, Layout::Zigzag), 0);
        let error = says(result, &["was planned", "plan again"]);
        let Error::Data { column, row, message } = error else { panic!("{error:?}") };
        (column, row, message)
    };
    let (column, row, message) = changed(&[&[11, 12, 13, 14, 15], &[21, 22, 23]], &[&[1, 0, 1], &[1]]);
    assert_eq!((column.as_str(), row), ("tokens", 1));
    assert!(message.contains("length is 3, and 2 was planned"), "{message}");
    let (column, row, message) = changed(&[&[11, 12, 13, 14, 15], &[21, 22]], &[&[1, 1], &[1]]);
    assert_eq!((column.as_str(), row), ("loss_mask", 0));
    assert!(message.contains("response length is 2, and 3 was planned"), "{message}");
    let (column, row, message) = changed(&[&[11, 12, 13, 14, 15], &[21, 22]], &[&[1, 0, 1], &[0]]);
    assert_eq!((column.as_str(), row), ("loss_mask", 1));
    assert!(message.contains("mask sum is 0, and 1 was planned"), "{message}");
}

#[test]
fn a_changed_response_length_is_told_of_the_column_that_there_is() {
    let data = |lengths: &[i64]| {
        batch(vec![("tokens", lists(&[&[1, 2, 3, 4], &[5, 6]])), ("response_length", int64(lengths))])
    };
    let before = planned(&[data(&[2, 1])], &request(), &[0, 1]);
    let rows = source(&[data(&[3, 1])], &request()).unwrap();
    let error = filled(&rows, &before, &cut(1, Layout::Zigzag), 0).unwrap_err();
    assert!(matches!(&error, Error::Data { column, row: 0, .. } if column == "response_length"), "{error}");
}

#[test]
fn a_row_that_is_no_longer_there_is_refused() {
    let before = planned(&[two()], &request(), &[0, 1]);
    let shorter = source(&[two().slice(0, 1)], &request()).unwrap();
    says(
        filled(&shorter, &before, &cut(1, Layout::Zigzag), 0),
        &["row 1 was planned", "now has 1 row:", "a reader gives its rows only once"],
    );
    let nothing = source(&[], &request()).unwrap();
    says(filled(&nothing, &before, &cut(1, Layout::Zigzag), 0), &["row 0 was planned", "now has 0 rows"]);
    let negative = Lengths { rows: vec![-1], total: vec![5], response: vec![3], sums: vec![2] };
    let rows = source(&[two()], &request()).unwrap();
    says(filled(&rows, &negative, &cut(1, Layout::Zigzag), 0), &["row -1 was planned"]);
}

#[test]
fn rows_are_checked_again() {
    let before = planned(&[two()], &request(), &[0, 1]);
    let data = batch(vec![
        ("tokens", lists(&[&[11, 12, 13, 14, 15], &[21, 22]])),
        ("loss_mask", lists(&[&[1, 0, 7], &[1]])),
    ]);
    let rows = source(&[data], &request()).unwrap();
    says(filled(&rows, &before, &cut(1, Layout::Zigzag), 0), &["row 0", "position 2 is 7"]);
}

#[test]
fn buffers_of_another_size_are_refused() {
    let lengths = planned(&[two()], &request(), &[0, 1]);
    let rows = source(&[two()], &request()).unwrap();
    let cut = cut(1, Layout::Zigzag);
    let planned = lengths.planned();
    let size = planned.size(&cut);
    assert_eq!(rows.buffer_lengths(&size), [4 * 7 + 2 * 3, 7, 0, 0]);
    let (mut ints, mut mask) = (vec![0; 5], vec![false; 7]);
    let out = Buffers { ints: &mut ints, mask: &mut mask, floats: &mut [], doubles: &mut [] };
    says(pack(&rows, &planned, &cut, 0, &size, out), &["the buffers have to hold [34, 7, 0, 0]"]);
}

// Tokens

fn tokens_of(tokens: ArrayRef, mask: &[&[i64]], cut: &Cut, rank: i64) -> Result<Packed> {
    let data = batch(vec![("tokens", tokens), ("loss_mask", lists(mask))]);
    packed_with(&[data], &request(), &(0..mask.len() as i64).collect::<Vec<_>>(), cut, rank)
}

#[test]
fn a_token_fits_an_int32() {
    let most = i64::from(i32::MAX);
    let one = cut(1, Layout::Zigzag);
    let packed = tokens_of(lists(&[&[1, most]]), &[&[1]], &one, 0).unwrap();
    assert_eq!((packed.tokens, packed.labels), (vec![1, i32::MAX], vec![i32::MAX, -100]));
    let error = says(
        tokens_of(lists(&[&[1, 2], &[3, 4, most + 1, 6]]), &[&[1], &[1]], &one, 0),
        &["the value at position 2 is 2147483648", "fit an int32"],
    );
    assert!(matches!(&error, Error::Data { column, row: 1, .. } if column == "tokens"));
    let huge: ArrayRef =
        Arc::new(ListArray::from_iter_primitive::<UInt64Type, _, _>([Some(vec![Some(1), Some(u64::MAX)])]));
    says(tokens_of(huge, &[&[0]], &one, 0), &["position 1 is 18446744073709551615", "fit an int32"]);
    // Whichever rank holds it.
    let far =
        |rank| tokens_of(lists(&[&[1, 2, 3, 4, 5, 6, i64::MIN, 8]]), &[&[1]], &cut(2, Layout::Zigzag), rank);
    says(far(0), &["position 6 is -9223372036854775808"]);
    assert!(far(1).is_ok());
}

#[test]
fn a_trained_token_is_not_negative() {
    let one = cut(1, Layout::Zigzag);
    for token in [-1, -100] {
        says(
            tokens_of(lists(&[&[1, 2, token, 4]]), &[&[1, 1, 0]], &one, 0),
            &["row 0", &format!("the value at position 2 is {token}"), "a trained token"],
        );
    }
    // Where it is not trained it may be (an image, a padding of the caller's own).
    let packed = tokens_of(lists(&[&[-1, 2, -5, 4]]), &[&[1, 0, 1]], &one, 0).unwrap();
    assert_eq!((packed.tokens, packed.labels), (vec![-1, 2, -5, 4], vec![2, -100, 4, -100]));
    // On the rank that owns it, with the position in the sequence.
    let zigzag =
        |rank| tokens_of(lists(&[&[1, 2, 3, 4, -7, 6, 7, 8]]), &[&[1; 5]], &cut(2, Layout::Zigzag), rank);
    says(zigzag(1), &["position 4 is -7", "a trained token"]);
}

// What is carried along

fn carried(column: ArrayRef) -> Result<Packed> {
    let data = batch(vec![
        ("tokens", lists(&[&[1, 2, 3], &[4, 5, 6, 7]])),
        ("loss_mask", lists(&[&[0, 1], &[1, 0, 1]])),
        ("x", column),
    ]);
    packed_with(&[data], &carrying(&["x"], &[]), &[0, 1], &cut(1, Layout::Zigzag), 0)
}

#[test]
fn token_columns_of_any_numeric_type() {
    let integers = lists(&[&[1, 0], &[1, 1, 0]]);
    for child in [
        DataType::Int8,
        DataType::UInt64,
        DataType::Boolean,
        DataType::Float16,
        DataType::Float32,
        DataType::Float64,
    ] {
        for kind in [
            DataType::List(Arc::new(Field::new("item", child.clone(), true))),
            DataType::LargeList(Arc::new(Field::new("item", child.clone(), true))),
        ] {
            let packed = carried(arrow_cast::cast(&integers, &kind).unwrap()).unwrap();
            assert_eq!(packed.columns, [[1.0, 0.0, 0.0, 1.0, 1.0, 0.0, 0.0]], "{kind}");
        }
    }
}

#[test]
fn token_columns_are_carried_where_the_mask_is_0_as_well() {
    let packed = carried(f32_lists(&[&[f32::NAN, 2.0], &[3.0, f32::INFINITY, 5.0]])).unwrap();
    assert!(packed.columns[0][0].is_nan());
    assert_eq!(packed.columns[0][1..], [2.0, 0.0, 3.0, f32::INFINITY, 5.0, 0.0]);
}

#[test]
fn a_token_column_that_cannot_be_carried_is_refused() {
    says(carried(f32_lists(&[&[1.0, 2.0], &[3.0]])), &["'x', row 1", "1 value ", "3 tokens"]);
    let ints = |x| nullable_lists(vec![Some(vec![Some(1), x]), Some(vec![Some(1); 3])]);
    says(carried(ints(None)), &["'x', row 0", "the value at position 1 is null"]);
    says(carried(nullable_lists(vec![Some(vec![Some(1); 2]), None])), &["'x', row 1", "is null"]);
    let for_samples = "a value for each sample, not for each token, is named in sample_columns=";
    says(carried(int64(&[1, 2])), &["column 'x'", "has type Int64", "a list of numbers", for_samples]);
    let text = StringArray::from(vec!["0.5", "1"]);
    says(
        carried(Arc::new(text)),
        &["column 'x'", "has type Utf8", "a list of numbers", "it holds text; parse it"],
    );
    // As float32, 2^24 + 1 would become 2^24.
    for x in [(1 << 24) + 1, -(1 << 24) - 1, 1 << 40, i64::MIN] {
        says(carried(ints(Some(x))), &["'x', row 0", &format!("position 1 is {x}, which a float32 cannot")]);
    }
    let packed = carried(ints(Some(-(1 << 24)))).unwrap();
    assert_eq!(packed.columns[0][1].to_bits(), (-16_777_216f32).to_bits());
    says(
        packed_with(&[two()], &carrying(&["nowhere"], &[]), &[0], &cut(1, Layout::Zigzag), 0),
        &["'nowhere'", "is missing", "'logprobs'"],
    );
}

fn sampled(column: ArrayRef) -> Result<Packed> {
    let data = batch(vec![
        ("tokens", lists(&[&[1, 2], &[4, 5]])),
        ("response_length", int64(&[1, 1])),
        ("x", column),
    ]);
    packed_with(&[data], &carrying(&[], &["x"]), &[1, 0], &cut(1, Layout::Zigzag), 0)
}

#[test]
fn sample_columns() {
    let single = sampled(Arc::new(Float32Array::from(vec![Some(0.5), None]))).unwrap();
    assert!(single.floats[0][0].is_nan() && single.doubles.is_empty());
    assert_eq!(single.floats[0][1].to_bits(), 0.5f32.to_bits());
    let double = sampled(Arc::new(Float64Array::from(vec![0.1, 0.2]))).unwrap();
    assert_eq!(double.floats, [[0.2f32, 0.1f32]]);
    let exact = 1i64 << 53;
    let integers = sampled(int64(&[exact, -exact])).unwrap();
    assert_eq!(integers.doubles, [[-exact as f64, exact as f64]]);
    let bools = sampled(Arc::new(BooleanArray::from(vec![Some(true), None]))).unwrap();
    assert!(bools.doubles[0][0].is_nan());
    assert_eq!(bools.doubles[0][1].to_bits(), 1f64.to_bits());
    let nulls = sampled(Arc::new(NullArray::new(2))).unwrap();
    assert!(nulls.floats[0].iter().all(|x| x.is_nan()));
    let nullable = sampled(Arc::new(Int64Array::from(vec![None, Some(7)]))).unwrap();
    assert!(nullable.doubles[0][1].is_nan());
}

#[test]
fn a_sample_column_that_cannot_be_carried_is_refused() {
    for x in [(1 << 53) + 1, -(1 << 53) - 1, i64::MAX] {
        says(sampled(int64(&[x, 0])), &["'x', row 0", &x.to_string(), "cannot hold exactly"]);
    }
    says(sampled(lists(&[&[1], &[2]])), &["column 'x'", "has type List", "has to be a number"]);
}

#[test]
fn several_columns_keep_their_order() {
    let data = batch(vec![
        ("tokens", lists(&[&[1, 2], &[4, 5]])),
        ("response_length", int64(&[1, 1])),
        ("a", lists(&[&[1], &[2]])),
        ("b", lists(&[&[3], &[4]])),
        ("i", int64(&[10, 20])),
        ("f", Arc::new(Float32Array::from(vec![0.5, 1.5]))),
        ("j", int64(&[30, 40])),
        ("g", Arc::new(Float64Array::from(vec![2.5, 3.5]))),
    ]);
    let request = carrying(&["b", "a"], &["g", "i", "f", "j"]);
    let packed = packed_with(&[data], &request, &[0, 1], &cut(1, Layout::Zigzag), 0).unwrap();
    assert_eq!(packed.columns, [[3.0, 0.0, 4.0, 0.0], [1.0, 0.0, 2.0, 0.0]]);
    assert_eq!(packed.floats, [[2.5, 3.5], [0.5, 1.5]]);
    assert_eq!(packed.doubles, [[10.0, 20.0], [30.0, 40.0]]);
}

// For all input

#[derive(Debug, Clone)]
struct Sample {
    prompt: Vec<i64>,
    response: Vec<i64>,
    mask: Vec<bool>,
    advantages: Vec<f64>,
    reward: Option<f64>,
}

fn sample() -> impl Strategy<Value = Sample> {
    (
        prop::collection::vec(0..120_i64, 0..7),
        prop::collection::vec((0..120_i64, any::<bool>(), -9.0..9.0_f64), 0..12),
        prop::option::of(-9.0..9.0_f64),
    )
        .prop_filter_map("an empty sequence", |(prompt, response, reward)| {
            if prompt.is_empty() && response.is_empty() {
                return None;
            }
            let first = prompt.is_empty();
            let mask = response.iter().enumerate().map(|(i, r)| r.1 && !(first && i == 0)).collect();
            Some(Sample {
                prompt,
                mask,
                advantages: response.iter().map(|r| r.2).collect(),
                response: response.iter().map(|r| r.0).collect(),
                reward,
            })
        })
}

/// The words of the design, one position after the other.
fn restated(samples: &[&Sample], cp_size: i64, layout: Layout, pads: (i64, i64), rank: i64) -> Packed {
    let zigzag = layout == Layout::Zigzag && cp_size > 1;
    let multiple = lcm(if zigzag { 2 * cp_size } else { 1 }, pads.0);
    let total = |s: &Sample| (s.prompt.len() + s.response.len()) as i64;
    let mut padded: Vec<i64> = samples.iter().map(|s| up(total(s), multiple)).collect();
    let sum: i64 = padded.iter().sum();
    let whole = up(sum, lcm(if zigzag { 2 * cp_size } else { cp_size }, pads.1));
    *padded.last_mut().unwrap() += whole - sum;

    let mut out = Packed { columns: vec![vec![]], floats: vec![vec![]], ..Packed::default() };
    let (mut true_end, mut end) = (0, 0);
    out.cu_seqlens.push(0);
    out.cu_seqlens_padded.push(0);
    for (segment, (sample, length)) in samples.iter().zip(&padded).enumerate() {
        let sequence = [sample.prompt.clone(), sample.response.clone()].concat();
        for position in 0..*length {
            let held = if zigzag {
                let chunk = position / (length / (2 * cp_size));
                chunk == rank || chunk == 2 * cp_size - 1 - rank
            } else {
                (end + position) / (whole / cp_size) == rank
            };
            if !held {
                continue;
            }
            let here = sequence.get(position as usize);
            out.tokens.push(here.map_or(0, |t| *t as i32));
            out.segment_ids.push(if here.is_some() { segment as i32 } else { -1 });
            out.position_ids.push(position as i32);
            // The token after this one, where that is a token of the response.
            let next = (position + 1 - sample.prompt.len() as i64).try_into().ok();
            let next: Option<usize> = next.filter(|n| *n < sample.response.len());
            let trained = next.is_some_and(|n| sample.mask[n]);
            out.loss_mask.push(trained);
            out.labels.push(if trained { sample.response[next.unwrap()] as i32 } else { -100 });
            out.columns[0].push(next.map_or(0.0, |n| sample.advantages[n] as f32));
        }
        true_end += sequence.len() as i32;
        end += length;
        out.cu_seqlens.push(true_end);
        out.cu_seqlens_padded.push(end as i32);
        out.max_seqlen = out.max_seqlen.max(*length);
        out.floats[0].push(sample.reward.unwrap_or(f64::NAN) as f32);
    }
    out
}

/// The samples as Arrow, cut into batches, the first of them a slice of something longer.
fn as_arrow(
    samples: &[Sample],
    token: &DataType,
    mask: &DataType,
    large: bool,
    stated: bool,
    at: usize,
) -> Vec<RecordBatch> {
    let list = |array: ArrayRef, child: &DataType| {
        let field = Arc::new(Field::new("item", child.clone(), true));
        let kind = if large { DataType::LargeList(field) } else { DataType::List(field) };
        arrow_cast::cast(&array, &kind).unwrap()
    };
    let integers = |f: &dyn Fn(&Sample) -> Vec<i64>| {
        let rows: Vec<Vec<i64>> = samples.iter().map(f).collect();
        lists(&rows.iter().map(Vec::as_slice).collect::<Vec<_>>())
    };
    let advantages: ArrayRef = Arc::new(ListArray::from_iter_primitive::<Float64Type, _, _>(
        samples.iter().map(|s| Some(s.advantages.iter().copied().map(Some).collect::<Vec<_>>())),
    ));
    let mut columns = vec![
        ("tokens", list(integers(&|s| [s.prompt.clone(), s.response.clone()].concat()), token)),
        ("loss_mask", list(integers(&|s| s.mask.iter().map(|m| i64::from(*m)).collect()), mask)),
        ("advantages", list(advantages, &DataType::Float64)),
        ("reward", Arc::new(Float64Array::from(samples.iter().map(|s| s.reward).collect::<Vec<_>>()))),
    ];
    if stated {
        columns.push((
            "response_length",
            int64(&samples.iter().map(|s| s.response.len() as i64).collect::<Vec<_>>()),
        ));
    }
    let whole = batch(columns);
    let at = at.min(samples.len());
    let twice = arrow_select::concat::concat_batches(&whole.schema(), [&whole, &whole]).unwrap();
    vec![twice.slice(samples.len(), at), whole.slice(at, samples.len() - at)]
}

proptest! {
    #![proptest_config(cases(400))]

    #[test]
    fn what_is_packed_is_what_the_design_says(
        samples in prop::collection::vec(sample(), 1..8),
        picks in prop::collection::vec(0..8_usize, 1..6),
        cp_size in 1..5_i64,
        zigzag in any::<bool>(),
        pads in (1..6_i64, 1..20_i64),
        token in prop::sample::select(vec![
            DataType::Int8, DataType::Int16, DataType::Int32, DataType::Int64,
            DataType::UInt8, DataType::UInt16, DataType::UInt32, DataType::UInt64,
        ]),
        mask in prop::sample::select(vec![
            DataType::Int64, DataType::UInt8, DataType::Boolean, DataType::Float16, DataType::Float32,
        ]),
        kinds in (any::<bool>(), any::<bool>(), 0..8_usize),
    ) {
        let (large, stated, at) = kinds;
        let layout = if zigzag { Layout::Zigzag } else { Layout::Contiguous };
        let batches = as_arrow(&samples, &token, &mask, large, stated, at);
        let request = carrying(&["advantages"], &["reward"]);
        let rows: Vec<i64> = picks.iter().map(|p| (p % samples.len()) as i64).collect();
        let chosen: Vec<&Sample> = rows.iter().map(|r| &samples[*r as usize]).collect();
        let cut = Cut::new(cp_size, layout, pads.0, pads.1).unwrap();
        let source = source(&batches, &request).unwrap();
        let lengths = planned(&batches, &plain(&request), &rows);
        let mut trained = 0;
        for rank in 0..cp_size {
            let packed = filled(&source, &lengths, &cut, rank).unwrap();
            let expected = restated(&chosen, cp_size, layout, pads, rank);
            // NaN marks a missing reward.
            prop_assert_eq!(format!("{packed:?}"), format!("{expected:?}"));
            trained += packed.loss_mask.iter().filter(|m| **m).count() as i64;
        }
        prop_assert_eq!(trained, lengths.sums.iter().sum::<i64>(), "each trained token has one owner");
    }
}

#[test]
fn work_is_that_of_padded_sequences() {
    // Each padded to a multiple of 2C = 4; the second micro-batch is a placeholder of one token.
    let (lengths, offsets) = ([3, 5, 2], [0, 2, 2, 3]);
    let zigzag = Cut::new(2, Layout::Zigzag, 1, 1).unwrap();
    assert_eq!(work(&lengths, &offsets, &zigzag).unwrap(), [(12, 16 + 64), (4, 16), (4, 16)]);
    // What a micro-batch is padded by lies behind its last sequence: 4 + 12, 16, 16.
    let whole = Cut::new(2, Layout::Zigzag, 1, 16).unwrap();
    assert_eq!(work(&lengths, &offsets, &whole).unwrap(), [(16, 16 + 144), (16, 256), (16, 256)]);
    for outside in [[0, 2, 4], [0, 2, 1], [-1, 1, 3]] {
        says(work(&lengths, &outside, &whole), &["offsets of micro-batches have to rise"]);
    }
}

// What is wrong with a value is told, with its row in the whole data

#[test]
fn a_trained_label_that_int32_cannot_hold_is_refused_on_the_rank_of_its_logit() {
    // Rank 0 holds positions 0, 1, 6 and 7, and the logit of token 6 is on rank 1.
    let zigzag = cut(2, Layout::Zigzag);
    for rank in [0, 1] {
        let packed = tokens_of(lists(&[&[1, 2, 3, 4, 5, 6, 1 << 31, 8]]), &[&[1, 1]], &zigzag, rank);
        says(packed, &["row 0", "position 6 is 2147483648", "fit an int32"]);
    }
}

#[test]
fn a_number_over_float32_is_refused_and_an_infinity_is_not() {
    let most = f64::from(f32::MAX);
    let data = |x: f64, infinite: f64| {
        let rows = [[Some(1.0), Some(2.0)], [Some(x), Some(infinite)]].map(|row| Some(row.to_vec()));
        let lists_of_x: ArrayRef = Arc::new(ListArray::from_iter_primitive::<Float64Type, _, _>(rows));
        batch(vec![
            ("tokens", lists(&[&[1, 2, 3], &[1, 2, 3]])),
            ("loss_mask", lists(&[&[1, 1], &[1, 1]])),
            ("x", lists_of_x),
        ])
    };
    let packed = |x, infinite| {
        packed_with(&[data(x, infinite)], &carrying(&["x"], &[]), &[0, 1], &cut(1, Layout::Zigzag), 0)
    };
    let column = |x, infinite| packed(x, infinite).unwrap().columns[0].clone();
    assert_eq!(column(most, f64::INFINITY), [1.0, 2.0, 0.0, f32::MAX, f32::INFINITY, 0.0]);
    assert_eq!(column(-most, f64::NEG_INFINITY), [1.0, 2.0, 0.0, f32::MIN, f32::NEG_INFINITY, 0.0]);
    for (x, other) in [(1e39, 0.0), (-1e39, 0.0), (0.0, 1e39), (1e39, f64::INFINITY)] {
        says(packed(x, other), &["column 'x', row 1", "too large for a float32"]);
    }
}

#[test]
fn the_place_of_a_value_that_cannot_be_carried_is_counted_in_the_response() {
    // Of 4 + 8 tokens rank 0 of 2 has the first 6, and with them of row 1 the values 0 and 1; rank 1 has its values 2 to 6.
    let packed = |x: ArrayRef, rank| {
        let tokens = lists(&[&[1; 4], &[1; 8]]);
        let data = batch(vec![("tokens", tokens), ("response_length", int64(&[3, 7])), ("x", x)]);
        packed_with(&[data], &carrying(&["x"], &[]), &[0, 1], &cut(2, Layout::Contiguous), rank)
    };
    let rows = [vec![1.0; 3], vec![1.0, 1.0, 1.0, 1.0, 1e39, 2e39, 1.0]];
    let rows = rows.map(|row| Some(row.into_iter().map(Some)));
    let large: ArrayRef = Arc::new(ListArray::from_iter_primitive::<Float64Type, _, _>(rows));
    assert_eq!(packed(Arc::clone(&large), 0).unwrap().columns[0], [1.0, 1.0, 1.0, 0.0, 1.0, 1.0]);
    says(packed(large, 1), &["column 'x', row 1: the value at position 4 is 1e39, too large for a float32"]);
    let exact = lists(&[&[1; 3], &[1, 1, 1, 1, 1, (1 << 24) + 1, 1]]);
    assert_eq!(packed(Arc::clone(&exact), 0).unwrap().columns[0], [1.0, 1.0, 1.0, 0.0, 1.0, 1.0]);
    says(
        packed(exact, 1),
        &["column 'x', row 1: the value at position 5 is 16777217, which a float32 cannot hold"],
    );
}

/// Two batches of two rows, of which the last has `value` in column `x`.
fn with_last(values: [ArrayRef; 2]) -> Result<Packed> {
    let batches = values.map(|x| {
        batch(vec![("tokens", lists(&[&[1, 2], &[3, 4]])), ("loss_mask", lists(&[&[1], &[1]])), ("x", x)])
    });
    packed_with(&batches, &carrying(&[], &["x"]), &[3], &cut(1, Layout::Zigzag), 0)
}

#[test]
fn integers_of_a_sample_that_a_float_cannot_hold_are_refused_with_their_row() {
    let whole = |x: i64| with_last([int64(&[0, 0]), int64(&[0, x])]);
    assert_eq!(whole(1 << 53).unwrap().doubles, [[9_007_199_254_740_992.0]]);
    assert_eq!(whole(-(1 << 53)).unwrap().doubles, [[-9_007_199_254_740_992.0]]);
    for x in [(1 << 53) + 1, -(1 << 53) - 1] {
        let text = format!("{x} is an integer that a float cannot hold exactly");
        says(whole(x), &["column 'x', row 3", &text]);
    }
}

#[test]
fn a_number_of_a_sample_has_to_fit_a_float32_where_its_column_is_one() {
    let zeros = || -> ArrayRef { Arc::new(Float64Array::from(vec![0.0, 0.0])) };
    let whole = |x: f64| with_last([zeros(), Arc::new(Float64Array::from(vec![0.0, x]))]);
    for x in [f32::MAX, f32::MIN, f32::INFINITY] {
        assert_eq!(whole(f64::from(x)).unwrap().floats, [[x]]);
    }
    for x in [1e39, -1e39] {
        says(whole(x), &["column 'x', row 3", "is too large for a float32"]);
    }
    // Integers of a later part of the data, too.
    let mixed = |x: i64| with_last([zeros(), int64(&[0, x])]);
    assert_eq!(mixed(1 << 24).unwrap().floats, [[16_777_216.0]]);
    says(
        mixed((1 << 24) + 1),
        &["column 'x', row 3", "16777217 is an integer that a float cannot hold exactly"],
    );
}

#[test]
fn rows_that_are_appended_come_behind_those_that_are_there() {
    let one = |token: i64| batch(vec![("tokens", lists(&[&[token, token]])), ("loss_mask", lists(&[&[1]]))]);
    let mut rows = source(&[one(1)], &request()).unwrap();
    // Of others too, the second batch begins where the first ends.
    rows.append(&source(&[one(2), one(3)], &request()).unwrap());
    rows.append(&source(&[one(4)], &request()).unwrap());
    assert_eq!(rows.num_rows(), 4);
    let lengths =
        Lengths { rows: vec![3, 1, 2, 0], total: vec![2; 4], response: vec![1; 4], sums: vec![1; 4] };
    let packed = filled(&rows, &lengths, &cut(1, Layout::Zigzag), 0).unwrap();
    assert_eq!(packed.tokens, [4, 4, 2, 2, 3, 3, 1, 1]);
}
