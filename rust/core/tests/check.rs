//! Reading rollouts: every fault is found, and says where it is; every legal type gives the same summary.
#![allow(clippy::unwrap_used, clippy::panic)] // a test that cannot go on has failed

mod common;

use std::sync::Arc;

use arrow_array::cast::AsArray;
use arrow_array::types::{Float64Type, Int8Type, Int64Type};
use arrow_array::{
    Array, ArrayRef, BinaryArray, BooleanArray, DictionaryArray, FixedSizeBinaryArray, FixedSizeListArray,
    Float64Array, Int32Array, Int64Array, LargeStringArray, ListArray, NullArray, RecordBatch, StringArray,
    StringViewArray, UInt64Array, make_array,
};
use arrow_buffer::{Buffer, NullBuffer, OffsetBuffer};
use arrow_data::ArrayData;
use arrow_schema::{ArrowError, DataType, Field};
use common::{
    batch, cases, inspect, int64, lists, named, nullable_lists, options, read, request, says, with_groups,
};
use proptest::prelude::*;
use rollpack_core::Error;
use rollpack_core::check::Faults;
use rollpack_core::columns::Request;
use rollpack_core::plan::plan;
use rollpack_core::summary::{Summary, summarize};

/// Three rows in order.
fn table() -> Vec<(&'static str, ArrayRef)> {
    vec![
        ("tokens", lists(&[&[1, 2, 3], &[4, 5, 6], &[7, 8, 9, 10]])),
        ("response_length", int64(&[1, 2, 3])),
        ("loss_mask", lists(&[&[1], &[0, 1], &[1, 0, 1]])),
        ("rollout_id", int64(&[5, 6, 7])),
    ]
}

fn without(name: &str) -> Vec<(&'static str, ArrayRef)> {
    table().into_iter().filter(|(n, _)| *n != name).collect()
}

/// The three rows with one column replaced or added.
fn with(name: &'static str, array: ArrayRef) -> Vec<(&'static str, ArrayRef)> {
    let mut columns = without(name);
    columns.push((name, array));
    columns
}

fn renamed(name: &str, to: &'static str) -> Vec<(&'static str, ArrayRef)> {
    table().into_iter().map(|(n, array)| (if n == name { to } else { n }, array)).collect()
}

/// Every way of cutting the rows into a few batches, empty ones among them.
fn cuts(whole: &RecordBatch) -> Vec<Vec<RecordBatch>> {
    let n = whole.num_rows();
    let mut cuts = vec![vec![whole.clone()]];
    for a in 0..=n {
        for b in a..=n {
            cuts.push(vec![whole.slice(0, a), whole.slice(a, b - a), whole.slice(b, n - b)]);
        }
    }
    cuts
}

#[track_caller]
fn is_data_error(error: &Error, wanted_column: &str, wanted_row: i64, parts: &[&str]) {
    let Error::Data { column, row, message } = error else { panic!("not of a row: {error:?}") };
    assert_eq!((column.as_str(), *row), (wanted_column, wanted_row), "{message}");
    for part in parts {
        assert!(message.contains(part), "'{part}' is not in: {message}");
    }
    let text = error.to_string();
    assert!(text.contains(wanted_column) && text.contains(&format!("row {wanted_row}")), "{text}");
}

/// The one fault of the data, however it is cut into batches.
#[track_caller]
fn data_fault(
    columns: Vec<(&'static str, ArrayRef)>,
    request: &Request,
    column: &str,
    row: i64,
    parts: &[&str],
) {
    let whole = batch(columns);
    for batches in cuts(&whole) {
        let Err(error) = read(&batches, request) else { panic!("not refused; wanted {parts:?}") };
        is_data_error(&error, column, row, parts);
        let (summary, found) = inspect(&batches, request);
        assert_eq!(found, [error]);
        let left: Vec<i64> = (0..whole.num_rows() as i64).filter(|r| *r != row).collect();
        assert_eq!(summary.row, left);
    }
}

#[track_caller]
fn schema_fault(columns: Vec<(&'static str, ArrayRef)>, request: &Request, column: &str, parts: &[&str]) {
    let error = says(read(&[batch(columns)], request), parts);
    assert!(matches!(&error, Error::Schema { column: c, .. } if c == column), "{error:?}");
}

#[track_caller]
fn is_in_order(summary: &Summary) {
    assert_eq!(summary.row, [0, 1, 2]);
    assert_eq!(summary.total_length, [3, 3, 4]);
    assert_eq!(summary.response_length, [1, 2, 3]);
    assert_eq!(summary.mask_sum, [1, 1, 2]);
}

// What is in order

#[test]
fn rows_in_order_are_summarized_however_they_are_cut() {
    for batches in cuts(&batch(table())) {
        let summary = read(&batches, &request()).unwrap();
        is_in_order(&summary);
        assert_eq!(summary.key[0].values.as_primitive::<Int64Type>().values().to_vec(), [5, 6, 7]);
    }
}

#[test]
fn a_mask_may_stand_for_the_response_length_and_the_other_way_round() {
    is_in_order(&read(&[batch(without("response_length"))], &request()).unwrap());
    is_in_order(&read(&[batch(table())], &named(&[("response_length", None)])).unwrap());
    for summary in [
        read(&[batch(without("loss_mask"))], &request()).unwrap(),
        read(&[batch(table())], &named(&[("loss_mask", None)])).unwrap(),
    ] {
        assert_eq!(summary.mask_sum, [1, 2, 3], "every response token is trained");
    }
}

#[test]
fn a_mask_as_long_as_the_sequence_is_legal_without_a_response_length() {
    let mask = lists(&[&[0, 1, 1], &[0, 0, 1], &[0, 0, 0, 0]]);
    let mut columns = without("response_length");
    columns.retain(|(n, _)| *n != "loss_mask");
    columns.push(("loss_mask", mask));
    let summary = read(&[batch(columns)], &request()).unwrap();
    assert_eq!(summary.response_length, [3, 3, 4]);
    assert_eq!(summary.mask_sum, [2, 1, 0]);
}

#[test]
fn an_empty_response_is_legal() {
    let mut columns = with("loss_mask", lists(&[&[], &[], &[1, 0, 1]]));
    columns.retain(|(n, _)| *n != "response_length");
    columns.push(("response_length", int64(&[0, 0, 3])));
    let summary = read(&[batch(columns)], &request()).unwrap();
    assert_eq!((&*summary.response_length, &*summary.mask_sum), (&[0, 0, 3][..], &[0, 0, 2][..]));
}

#[test]
fn position_0_may_be_a_response_token_that_is_not_trained() {
    let mut columns = with("loss_mask", lists(&[&[0, 1, 1], &[0, 1], &[1, 0, 1]]));
    columns.retain(|(n, _)| *n != "response_length");
    columns.push(("response_length", int64(&[3, 2, 3])));
    assert_eq!(read(&[batch(columns)], &request()).unwrap().mask_sum, [2, 1, 2]);
}

#[test]
fn columns_may_have_other_names() {
    let columns = vec![
        ("input_ids", lists(&[&[1, 2, 3], &[4, 5, 6], &[7, 8, 9, 10]])),
        ("mask", lists(&[&[1], &[0, 1], &[1, 0, 1]])),
        ("episode", int64(&[0, 0, 1])),
    ];
    let names =
        named(&[("tokens", Some("input_ids")), ("loss_mask", Some("mask")), ("rollout_id", Some("episode"))]);
    let summary = read(&[batch(columns.clone())], &names).unwrap();
    is_in_order(&summary);
    assert_eq!(summary.key[0].name, "episode");
    assert_eq!(summary.key_names(&names), ["rollout_id"]);
    // A fault speaks of the data's own name.
    let mut faulty = columns;
    faulty[1].1 = lists(&[&[1], &[0, 9], &[1, 0, 1]]);
    data_fault(faulty, &names, "mask", 1, &["is 9"]);
}

// Faults of rows

#[test]
fn a_null_is_refused() {
    let mask = |row1| nullable_lists(vec![Some(vec![Some(1)]), row1, Some(vec![Some(1), Some(0), Some(1)])]);
    data_fault(with("loss_mask", mask(None)), &request(), "loss_mask", 1, &["is null"]);
    data_fault(
        with("loss_mask", mask(Some(vec![Some(0), None]))),
        &request(),
        "loss_mask",
        1,
        &["the value at position 1 is null; fill it or drop the row"],
    );
    let tokens = |row2| {
        let full = |from: i64| Some((from..from + 3).map(Some).collect());
        nullable_lists(vec![full(1), full(4), row2])
    };
    data_fault(with("tokens", tokens(None)), &request(), "tokens", 2, &["is null"]);
    data_fault(
        with("tokens", tokens(Some(vec![Some(7), Some(8), None, Some(10)]))),
        &request(),
        "tokens",
        2,
        &["the value at position 2 is null"],
    );
    let lengths: ArrayRef = Arc::new(Int64Array::from(vec![None, Some(2), Some(3)]));
    data_fault(with("response_length", lengths), &request(), "response_length", 0, &["is null"]);
    let ids: ArrayRef = Arc::new(Int64Array::from(vec![Some(1), None, Some(1)]));
    data_fault(with("rollout_id", Arc::clone(&ids)), &request(), "rollout_id", 1, &["is null", "made up"]);
    data_fault(with("group_index", ids), &with_groups(), "group_index", 1, &["is null", "made up"]);
    let names: ArrayRef = Arc::new(StringArray::from(vec![Some("a"), Some("b"), None]));
    data_fault(with("rollout_id", names), &request(), "rollout_id", 2, &["is null"]);
}

#[test]
fn a_column_of_nulls_is_refused() {
    let nulls = || -> ArrayRef { Arc::new(NullArray::new(3)) };
    for name in ["rollout_id", "response_length"] {
        let error = says(read(&[batch(with(name, nulls()))], &request()), &["is null"]);
        is_data_error(&error, name, 0, &[]);
    }
    schema_fault(with("loss_mask", nulls()), &request(), "loss_mask", &["has type Null"]);
    schema_fault(with("tokens", nulls()), &request(), "tokens", &["has type Null"]);
}

#[test]
fn a_null_list_over_values_is_null_all_the_same() {
    let values = int64(&[1, 0, 1, 1, 0, 1]);
    let column = |nulls| -> ArrayRef {
        let offsets = OffsetBuffer::new(vec![0, 1, 3, 6].into());
        let field = Arc::new(Field::new("item", DataType::Int64, true));
        Arc::new(ListArray::new(field, offsets, Arc::clone(&values), Some(nulls)))
    };
    let whole = with("loss_mask", column(NullBuffer::new_valid(3)));
    is_in_order(&read(&[batch(whole)], &request()).unwrap());
    let null = with("loss_mask", column(NullBuffer::from(vec![true, false, true])));
    data_fault(null, &request(), "loss_mask", 1, &["is null"]);
}

#[test]
fn values_that_no_row_holds_do_not_matter() {
    // A null, a 7 and a NaN before, between and after the rows.
    let values = Arc::new(Float64Array::from(vec![
        None,
        Some(7.0),
        Some(1.0),
        Some(0.0),
        Some(1.0),
        Some(1.0),
        Some(0.0),
        Some(1.0),
        Some(f64::NAN),
        None,
    ]));
    let offsets = OffsetBuffer::new(vec![2, 3, 5, 8].into());
    let field = Arc::new(Field::new("item", DataType::Float64, true));
    let mask = ListArray::new(field, offsets, values, None);
    is_in_order(&read(&[batch(with("loss_mask", Arc::new(mask)))], &request()).unwrap());
}

#[test]
fn a_mask_holds_0_and_1() {
    let integers = lists(&[&[1], &[0, 1], &[1, 0, 2]]);
    data_fault(
        with("loss_mask", integers),
        &request(),
        "loss_mask",
        2,
        &["the value at position 2 is 2", "only 0 and 1"],
    );
    data_fault(
        with("loss_mask", lists(&[&[-1], &[0, 1], &[1, 0, 1]])),
        &request(),
        "loss_mask",
        0,
        &["is -1"],
    );
    // Of several wrong values the first is named.
    data_fault(
        with("loss_mask", lists(&[&[1], &[5, 6], &[1, 0, 1]])),
        &request(),
        "loss_mask",
        1,
        &["position 0 is 5"],
    );
    for (wrong, shown) in [
        (0.5, "0.5"),
        (f64::NAN, "NaN"),
        (f64::INFINITY, "inf"),
        (1.0 + f64::EPSILON, "1.0000000000000002"),
        (f64::MIN_POSITIVE, "2.2250738585072014e-308"),
    ] {
        let row = |values: &[f64]| Some(values.iter().copied().map(Some).collect::<Vec<_>>());
        let mask = ListArray::from_iter_primitive::<arrow_array::types::Float64Type, _, _>([
            row(&[1.0]),
            row(&[0.0, 1.0]),
            row(&[1.0, wrong, 1.0]),
        ]);
        let columns = with("loss_mask", Arc::new(mask));
        data_fault(columns, &request(), "loss_mask", 2, &[&format!("position 1 is {shown},")]);
    }
}

#[test]
fn a_mask_of_255_and_more_is_summed_and_checked() {
    // Sums are counted in bytes, 255 at a time.
    for n in [254, 255, 256, 510, 511, 1000] {
        let ones = vec![Some(1); n];
        let one = |mask: Vec<Option<i8>>| {
            let mask: ArrayRef = Arc::new(ListArray::from_iter_primitive::<Int8Type, _, _>([Some(mask)]));
            let tokens = lists(&[&vec![7; n + 1]]);
            read(&[batch(vec![("tokens", tokens), ("loss_mask", mask)])], &request())
        };
        assert_eq!(one(ones.clone()).unwrap().mask_sum, [n as i64]);
        for wrong in [0, n / 2, n - 1] {
            let mut mask = ones.clone();
            mask[wrong] = Some(-1);
            let error = says(one(mask), &["is -1"]);
            is_data_error(&error, "loss_mask", 0, &[&format!("position {wrong} is -1")]);
        }
    }
}

#[test]
fn no_part_of_a_wide_integer_is_taken_for_the_whole() {
    // The lowest byte of each is 0 or 1, as are the lowest four of the last two.
    for wrong in [256, 257, -255, -256, 1 << 31, 1 << 32, (1 << 32) + 1] {
        // Alone, in a chunk of its own, and in the rest behind one.
        for (n, at) in [(1, 0), (128, 127), (130, 129)] {
            let mut mask = vec![Some(1i64); n];
            mask[at] = Some(wrong);
            let mask: ArrayRef =
                Arc::new(ListArray::from_iter_primitive::<arrow_array::types::Int64Type, _, _>([Some(mask)]));
            let read =
                read(&[batch(vec![("tokens", lists(&[&vec![7; n + 1]])), ("loss_mask", mask)])], &request());
            is_data_error(&says(read, &[]), "loss_mask", 0, &[&format!("position {at} is {wrong}, and")]);
        }
    }
}

#[test]
fn wrong_values_do_not_make_up_for_each_other() {
    // Their sums are counts that may be: of bytes, 2 * 128 is 0 again; and two that are alike have no bit apart.
    for wrong in
        [vec![2, 2], vec![3, 3], vec![2, 0, -2], vec![2, 3, 0], vec![2; 128], vec![i64::MIN, i64::MIN]]
    {
        let mask = wrong.iter().copied().map(Some);
        let mask: ArrayRef =
            Arc::new(ListArray::from_iter_primitive::<arrow_array::types::Int64Type, _, _>([Some(mask)]));
        let tokens = lists(&[&vec![7; wrong.len() + 1]]);
        let read = read(&[batch(vec![("tokens", tokens), ("loss_mask", mask)])], &request());
        is_data_error(&says(read, &[]), "loss_mask", 0, &[&format!("position 0 is {}, and", wrong[0])]);
    }
}

#[test]
fn a_mask_is_as_long_as_the_response() {
    data_fault(
        with("loss_mask", lists(&[&[1], &[1], &[1, 0, 1]])),
        &request(),
        "loss_mask",
        1,
        &["the mask has 1 value and response_length is 2"],
    );
    data_fault(
        with("loss_mask", lists(&[&[1], &[0, 1], &[1, 0, 1, 1]])),
        &request(),
        "loss_mask",
        2,
        &[
            "the mask has 4 values and response_length is 3",
            "covers prompt and response",
            "legal where response_length is left out",
            "columns={\"response_length\": None}",
        ],
    );
    data_fault(
        with("loss_mask", lists(&[&[1], &[0, 1], &[1, 0, 1, 1, 1]])),
        &request(),
        "loss_mask",
        2,
        &["the mask has 5 values and response_length is 3; they have to be equal"],
    );
    let mut columns = with("loss_mask", lists(&[&[1], &[0, 0, 0, 1], &[1, 0, 1]]));
    columns.retain(|(n, _)| *n != "response_length");
    data_fault(
        columns,
        &request(),
        "loss_mask",
        1,
        &["the mask has 4 values", "the whole sequence only 3 tokens"],
    );
}

#[test]
fn a_response_length_lies_within_the_sequence() {
    let lengths = |n| with("response_length", int64(&[1, 2, n]));
    data_fault(lengths(-1), &request(), "response_length", 2, &["-1 is negative"]);
    data_fault(lengths(i64::MIN), &request(), "response_length", 2, &["-9223372036854775808 is negative"]);
    data_fault(lengths(5), &request(), "response_length", 2, &["5 is larger than the sequence", "4 tokens"]);
    let huge: ArrayRef = Arc::new(UInt64Array::from(vec![1, 2, u64::MAX]));
    data_fault(
        with("response_length", huge),
        &request(),
        "response_length",
        2,
        &["18446744073709551615 is larger than the sequence"],
    );
}

#[test]
fn an_empty_sequence_is_refused() {
    let mut columns = with("tokens", lists(&[&[1, 2, 3], &[], &[7, 8, 9, 10]]));
    columns.retain(|(n, _)| *n == "tokens");
    columns.push(("response_length", int64(&[1, 0, 3])));
    data_fault(columns.clone(), &request(), "tokens", 1, &["is empty"]);
    columns.pop();
    columns.push(("loss_mask", lists(&[&[1], &[], &[1, 1, 1]])));
    data_fault(columns, &request(), "tokens", 1, &["is empty"]);
}

#[test]
fn no_logit_predicts_the_token_at_position_0() {
    let mut columns = with("loss_mask", lists(&[&[1], &[0, 1], &[1, 0, 0, 0]]));
    columns.retain(|(n, _)| *n != "response_length");
    data_fault(
        columns,
        &request(),
        "loss_mask",
        2,
        &["position 0", "trained", "no logit", "first mask value to 0"],
    );

    let mut columns = without("loss_mask");
    columns.retain(|(n, _)| *n != "response_length");
    columns.push(("response_length", int64(&[1, 3, 3])));
    data_fault(columns, &request(), "response_length", 1, &["position 0", "no logit", "give a loss_mask"]);

    let bools: ArrayRef =
        arrow_cast::cast(&lists(&[&[1], &[1, 0, 0], &[0, 0, 1]]), &list_of(DataType::Boolean)).unwrap();
    let mut columns = with("loss_mask", bools);
    columns.retain(|(n, _)| *n != "response_length");
    data_fault(columns, &request(), "loss_mask", 1, &["position 0"]);
}

#[test]
fn a_rollout_lies_in_one_group() {
    let mut columns = with("rollout_id", int64(&[5, 6, 5]));
    columns.push(("group_index", int64(&[0, 0, 9])));
    data_fault(
        columns.clone(),
        &with_groups(),
        "group_index",
        2,
        &[
            "rollout_id 5 is in group 9",
            "another group at row 0",
            "rollout_key=(\"group_index\", \"rollout_id\")",
        ],
    );
    assert!(read(&[batch(columns)], &request()).is_ok(), "groups are looked at only where asked for");

    // Text is shown in quotes.
    let text = |ids: [&str; 3]| -> ArrayRef { Arc::new(StringArray::from(ids.to_vec())) };
    let mut columns = with("rollout_id", text(["a", "b", "a"]));
    columns.push(("group_index", text(["x", "x", "y"])));
    data_fault(columns, &with_groups(), "group_index", 2, &["rollout_id 'a' is in group 'y' here"]);

    // Also where the other group was seen earlier.
    let mut columns = with("rollout_id", int64(&[5, 6, 6]));
    columns.push(("group_index", int64(&[3, 4, 3])));
    data_fault(columns, &with_groups(), "group_index", 2, &["rollout_id 6 is in group 3", "at row 1"]);
}

#[test]
fn several_faults_of_one_row_are_all_found() {
    let ids: ArrayRef = Arc::new(Int64Array::from(vec![Some(1), None, Some(1)]));
    let mut columns = with("loss_mask", lists(&[&[1], &[0, 3], &[1, 0, 1]]));
    columns.retain(|(n, _)| *n != "rollout_id");
    columns.push(("rollout_id", ids));
    let (summary, found) = inspect(&[batch(columns)], &request());
    assert_eq!(summary.row, [0, 2]);
    assert_eq!(summary.key[0].values.as_primitive::<Int64Type>().values().to_vec(), [1, 1]);
    assert_eq!(found.len(), 2);
    is_data_error(&found[0], "rollout_id", 1, &["is null"]);
    is_data_error(&found[1], "loss_mask", 1, &["is 3"]);
}

#[test]
fn faults_of_all_rows_are_found_up_to_the_limit() {
    let mut columns = with("loss_mask", lists(&[&[2], &[0, 1], &[1, 0, 3]]));
    columns.push(("group_index", int64(&[0, 0, 0])));
    let whole = batch(columns);
    for batches in cuts(&whole) {
        let (summary, found) = inspect(&batches, &with_groups());
        assert_eq!(summary.row, [1]);
        assert_eq!(summary.group[0].values.len(), 1);
        assert_eq!(found.len(), 2);
        is_data_error(&found[0], "loss_mask", 0, &["is 2"]);
        is_data_error(&found[1], "loss_mask", 2, &["is 3"]);
    }
    let mut faults = Faults::new(1);
    summarize([Ok(whole)].into_iter(), &request(), &mut faults).unwrap();
    assert!(faults.is_full());
    is_data_error(&faults.found[0], "loss_mask", 0, &["is 2"]);
}

// Faults of columns

#[test]
fn a_missing_column_is_named_with_its_near_miss() {
    schema_fault(
        renamed("tokens", "token_ids"),
        &request(),
        "tokens",
        &["is missing", "did you mean 'token_ids'?", "columns={\"tokens\": \"token_ids\"}", "'rollout_id'"],
    );
    schema_fault(
        renamed("tokens", "input_ids"),
        &request(),
        "tokens",
        &[
            "is missing",
            "columns={\"tokens\": \"its name\"}",
            "the columns are 'input_ids', 'response_length'",
        ],
    );
    schema_fault(table(), &with_groups(), "group_index", &["is missing", "the columns are"]);
    schema_fault(
        renamed("rollout_id", "group_idx"),
        &with_groups(),
        "group_index",
        &["did you mean 'group_idx'?"],
    );
    // A name that the caller gave has to be there.
    for role in ["tokens", "response_length", "loss_mask", "rollout_id"] {
        schema_fault(table(), &named(&[(role, Some("other"))]), "other", &["is missing"]);
    }
}

#[test]
fn a_column_in_another_spelling_is_not_taken_as_absent() {
    for (role, twin) in [
        ("loss_mask", "loss_masks"),
        ("loss_mask", "lossMask"),
        ("loss_mask", "Loss-Mask"),
        ("response_length", "response_lengths"),
        ("response_length", "ResponseLength"),
        ("rollout_id", "rolloutId"),
        ("rollout_id", "rollout_ids"),
        ("loss_mask", "los_mask"),
        ("loss_mask", "loss_maks"),
        ("response_length", "response_lenght"),
    ] {
        let renamed = renamed(role, twin);
        schema_fault(
            renamed.clone(),
            &request(),
            role,
            &[
                &format!("there is '{twin}'"),
                &format!("columns={{\"{role}\": \"{twin}\"}}"),
                &format!("columns={{\"{role}\": None}}"),
            ],
        );
        assert!(read(&[batch(renamed.clone())], &named(&[(role, Some(twin))])).is_ok());
        assert!(read(&[batch(renamed)], &named(&[(role, None)])).is_ok());
    }
}

#[test]
fn a_mask_or_a_response_length_is_needed() {
    let mut columns = without("loss_mask");
    columns.retain(|(n, _)| *n != "response_length");
    schema_fault(
        columns,
        &request(),
        "loss_mask",
        &["neither this column nor 'response_length' is there", "the columns are 'tokens', 'rollout_id'"],
    );
    let neither = named(&[("loss_mask", None), ("response_length", None)]);
    schema_fault(table(), &neither, "loss_mask", &["neither"]);
}

fn list_of(child: DataType) -> DataType {
    DataType::List(Arc::new(Field::new("item", child, true)))
}

#[test]
fn a_wrong_type_is_named() {
    let strings: ArrayRef = Arc::new(StringArray::from(vec!["a", "b", "c"]));
    let to = |array: &ArrayRef, to: &DataType| arrow_cast::cast(array, to).unwrap();
    let floats = to(&table()[0].1, &list_of(DataType::Float32));
    let words = to(&table()[0].1, &list_of(DataType::Utf8));
    for (column, array, parts) in [
        ("tokens", int64(&[1, 2, 3]), ["has type Int64", "a list of integers"]),
        ("tokens", floats, ["Float32", "a list of integers"]),
        ("loss_mask", int64(&[1, 1, 1]), ["has type Int64", "a list of 0 and 1"]),
        ("loss_mask", words, ["Utf8", "a list of 0 and 1"]),
        ("loss_mask", Arc::clone(&strings), ["has type Utf8", "a list of 0 and 1"]),
        ("response_length", strings, ["has type Utf8", "an integer"]),
        ("response_length", Arc::new(Float64Array::from(vec![1.0; 3])), ["has type Float64", "pandas"]),
        ("response_length", Arc::new(BooleanArray::from(vec![true; 3])), ["has type Boolean", "an integer"]),
        ("rollout_id", Arc::new(Float64Array::from(vec![1.0; 3])), ["has type Float64", "pandas"]),
        ("rollout_id", Arc::new(BooleanArray::from(vec![true; 3])), ["has type Boolean", "cast it"]),
        ("rollout_id", lists(&[&[1], &[2], &[3]]), ["has type List", "integers, strings or binary"]),
    ] {
        schema_fault(with(column, array), &request(), column, &parts);
    }
    let floats: ArrayRef = Arc::new(Float64Array::from(vec![1.0; 3]));
    schema_fault(with("group_index", Arc::clone(&floats)), &with_groups(), "group_index", &["Float64"]);
    is_in_order(&read(&[batch(with("group_index", floats))], &request()).unwrap());
}

#[test]
fn two_columns_of_one_name_are_refused() {
    let mut columns = table();
    columns.push(("loss_mask", lists(&[&[1], &[0, 1], &[1, 0, 1]])));
    schema_fault(columns, &request(), "loss_mask", &["two columns of this name"]);
}

#[test]
fn what_is_asked_for_has_to_make_sense() {
    schema_fault(table(), &named(&[("mask", Some("loss_mask"))]), "mask", &["the roles are tokens"]);
    schema_fault(table(), &named(&[("tokens", None)]), "tokens", &["is needed"]);
    let twice = Request { rollout_key: vec!["rollout_id".to_owned(); 2], ..request() };
    schema_fault(table(), &twice, "rollout_id", &["named twice"]);
}

#[test]
fn a_bad_column_is_one_fault_however_many_batches_there_are() {
    let (_, found) = inspect(&cuts(&batch(renamed("tokens", "x")))[5], &request());
    assert_eq!(found.len(), 1);
    let (_, found) =
        inspect(&cuts(&batch(with("rollout_id", Arc::new(Float64Array::from(vec![1.0; 3])))))[5], &request());
    assert_eq!(found.len(), 1);
    // Two bad columns are two.
    let mut columns = without("tokens");
    columns.retain(|(n, _)| *n != "rollout_id");
    columns.push(("rollout_id", Arc::new(BooleanArray::from(vec![true; 3]))));
    let (_, found) = inspect(&[batch(columns)], &request());
    assert_eq!(found.len(), 2);
}

#[test]
fn parts_have_one_schema() {
    let parts = [batch(table()), batch(without("response_length"))];
    let error = says(read(&parts, &request()), &["different columns", "from row 3 on", "response_length"]);
    assert!(matches!(error, Error::Input(_)));
    let narrow: ArrayRef = Arc::new(Int32Array::from(vec![5, 6, 7]));
    let error =
        says(read(&[batch(table()), batch(with("rollout_id", narrow))], &request()), &["Int32", "Int64"]);
    assert!(matches!(error, Error::Schema { .. }));
}

#[test]
fn no_rows_at_all_is_an_error() {
    let empty = batch(table()).slice(0, 0);
    for batches in [vec![], vec![empty.clone()], vec![empty.clone(), empty]] {
        let error = says(read(&batches, &request()), &["no rows"]);
        assert!(matches!(error, Error::Input(_)));
    }
}

#[test]
fn a_reader_that_fails_is_an_error() {
    let parts =
        [Ok(batch(table())), Err(ArrowError::IoError("gone".to_owned(), std::io::Error::other("gone")))];
    let result = summarize(parts.into_iter(), &request(), &mut Faults::new(1));
    let error = says(result, &["reading the data failed", "gone"]);
    assert!(matches!(error, Error::Input(_)));
}

#[test]
#[allow(unsafe_code)] // Arrow's safe constructors refuse what a foreign producer may send
fn corrupt_arrow_is_refused() {
    let data = |offsets: [i32; 4]| {
        let builder = ArrayData::builder(list_of(DataType::Int64))
            .len(3)
            .add_buffer(Buffer::from_slice_ref(offsets))
            .add_child_data(int64(&[1, 0, 1, 1, 0, 1]).to_data());
        // SAFETY: the reader under test looks at nothing before it has validated it.
        make_array(unsafe { builder.build_unchecked() })
    };
    is_in_order(&read(&[batch(with("loss_mask", data([0, 1, 3, 6])))], &request()).unwrap());
    for offsets in [[0, 1, 3, 7], [0, 3, 1, 6]] {
        schema_fault(with("loss_mask", data(offsets)), &request(), "loss_mask", &["corrupt"]);
    }
}

// Types

/// The same column in all list types, in one piece and as a slice of something longer.
fn as_all_lists(array: &ArrayRef, child: &DataType) -> Vec<ArrayRef> {
    let field = || Arc::new(Field::new("element", child.clone(), true));
    let mut types = vec![
        DataType::List(field()),
        DataType::LargeList(field()),
        DataType::ListView(field()),
        DataType::LargeListView(field()),
    ];
    let lengths: Vec<i32> = array.as_list::<i32>().offsets().lengths().map(|n| n as i32).collect();
    if lengths.iter().all(|n| *n == lengths[0]) {
        types.push(DataType::FixedSizeList(field(), lengths[0]));
    }
    let mut all = Vec::new();
    for kind in types {
        let whole = arrow_cast::cast(array, &kind).unwrap();
        let twice = arrow_select::concat::concat(&[whole.as_ref(), whole.as_ref()]).unwrap();
        all.push(twice.slice(whole.len(), whole.len()));
        all.push(whole);
    }
    all
}

const INTEGERS: [DataType; 8] = [
    DataType::Int8,
    DataType::Int16,
    DataType::Int32,
    DataType::Int64,
    DataType::UInt8,
    DataType::UInt16,
    DataType::UInt32,
    DataType::UInt64,
];

fn mask_types() -> Vec<DataType> {
    let others = [DataType::Boolean, DataType::Float16, DataType::Float32, DataType::Float64];
    INTEGERS.into_iter().chain(others).collect()
}

#[test]
fn a_mask_may_have_any_type() {
    for child in mask_types() {
        for mask in as_all_lists(&table()[2].1, &child) {
            let kind = mask.data_type().clone();
            let summary = read(&[batch(with("loss_mask", mask))], &request());
            is_in_order(&summary.unwrap_or_else(|e| panic!("{kind}: {e}")));
        }
        // Of equal lengths, so that a fixed-size list is among them.
        for mask in as_all_lists(&lists(&[&[0, 1], &[1, 1], &[0, 0]]), &child) {
            let mut columns = with("loss_mask", mask);
            columns.retain(|(n, _)| *n != "response_length");
            assert_eq!(read(&[batch(columns)], &request()).unwrap().mask_sum, [1, 2, 0]);
        }
    }
}

#[test]
fn tokens_and_lengths_may_be_any_integers() {
    for child in INTEGERS {
        for tokens in as_all_lists(&table()[0].1, &child) {
            is_in_order(&read(&[batch(with("tokens", tokens))], &request()).unwrap());
        }
        let lengths = arrow_cast::cast(&int64(&[1, 2, 3]), &child).unwrap();
        is_in_order(&read(&[batch(with("response_length", lengths))], &request()).unwrap());
    }
    let equal = lists(&[&[1, 2, 3, 4], &[5, 6, 7, 8], &[9, 1, 2, 3]]);
    for tokens in as_all_lists(&equal, &DataType::Int32) {
        assert_eq!(read(&[batch(with("tokens", tokens))], &request()).unwrap().total_length, [4, 4, 4]);
    }
}

#[test]
fn a_null_in_a_fixed_size_list_is_refused() {
    let field = Arc::new(Field::new("item", DataType::Int64, true));
    let nulls = Some(NullBuffer::from(vec![true, false, true]));
    let mask = FixedSizeListArray::new(field, 2, int64(&[0, 1, 1, 1, 0, 1]), nulls);
    let mut columns = with("loss_mask", Arc::new(mask));
    columns.retain(|(n, _)| *n != "response_length");
    data_fault(columns, &request(), "loss_mask", 1, &["is null"]);
}

#[test]
fn lists_that_are_all_empty_need_no_type() {
    let nulls: ArrayRef = Arc::new(NullArray::new(0));
    let field = Arc::new(Field::new("item", DataType::Null, true));
    let mask = ListArray::new(field, OffsetBuffer::new(vec![0; 4].into()), nulls, None);
    let mut columns = with("loss_mask", Arc::new(mask));
    columns.retain(|(n, _)| *n != "response_length");
    assert_eq!(read(&[batch(columns)], &request()).unwrap().mask_sum, [0, 0, 0]);
}

#[test]
fn minus_zero_is_zero() {
    let row = |values: &[f64]| Some(values.iter().copied().map(Some).collect::<Vec<_>>());
    let mask: ArrayRef = Arc::new(ListArray::from_iter_primitive::<arrow_array::types::Float64Type, _, _>([
        row(&[1.0]),
        row(&[-0.0, 1.0]),
        row(&[1.0, -0.0, 1.0]),
    ]));
    for child in [DataType::Float16, DataType::Float32, DataType::Float64] {
        let mask = arrow_cast::cast(&mask, &list_of(child)).unwrap();
        is_in_order(&read(&[batch(with("loss_mask", mask))], &request()).unwrap());
    }
}

// Ids

fn num_rollouts(summary: &Summary) -> i64 {
    plan(summary, &options(100)).unwrap().steps[0].num_rollouts
}

#[test]
fn ids_come_back_as_what_they_were() {
    let large = [u64::MAX, u64::MAX - 1, u64::MAX];
    let long = [(1i64 << 53) + 1, 1 << 53, (1 << 53) + 1]; // a float64 would merge these
    let words = ["b", "", "b"];
    let two: Vec<(ArrayRef, DataType)> = vec![
        (int64(&long), DataType::Int64),
        (int64(&[-1, i64::MIN, -1]), DataType::Int64),
        (Arc::new(UInt64Array::from(large.to_vec())), DataType::UInt64),
        (Arc::new(Int32Array::from(vec![-1, 3, -1])), DataType::Int32),
        (Arc::new(StringArray::from(words.to_vec())), DataType::Utf8),
        (Arc::new(LargeStringArray::from(words.to_vec())), DataType::LargeUtf8),
        (Arc::new(StringViewArray::from(words.to_vec())), DataType::LargeUtf8),
        (Arc::new(BinaryArray::from(vec![&b"\xff"[..], b"", b"\xff"])), DataType::Binary),
        (
            Arc::new(FixedSizeBinaryArray::try_from_iter([[7u8, 0], [0, 7], [7, 0]].iter()).unwrap()),
            DataType::FixedSizeBinary(2),
        ),
        (Arc::new(words.into_iter().collect::<DictionaryArray<Int8Type>>()), DataType::Utf8),
    ];
    for (ids, kind) in two {
        let plain = arrow_cast::cast(&ids, &kind).unwrap();
        for batches in cuts(&batch(with("rollout_id", Arc::clone(&ids)))) {
            let summary = read(&batches, &request()).unwrap();
            assert_eq!(&summary.key[0].values, &plain);
            assert_eq!(num_rollouts(&summary), 2, "{kind}");
            let batch = summary.to_batch(&summary.key_names(&request())).unwrap();
            assert_eq!(batch.column_by_name("rollout_id").unwrap(), &plain);
        }
        let mut columns = without("rollout_id");
        columns.push(("group_index", ids));
        let summary = read(&[batch(columns)], &with_groups()).unwrap();
        assert_eq!(&summary.group[0].values, &plain);
        assert_eq!(plan(&summary, &options(100)).unwrap().steps[0].num_prompts, Some(2));
    }
    for kind in INTEGERS {
        let ids = arrow_cast::cast(&int64(&[1, 2, 1]), &kind).unwrap();
        assert_eq!(num_rollouts(&read(&[batch(with("rollout_id", ids))], &request()).unwrap()), 2);
    }
}

#[test]
fn a_dictionary_of_floats_is_no_id_either() {
    let values = Arc::new(Float64Array::from(vec![1.0, 2.0]));
    let ids = DictionaryArray::new(arrow_array::Int8Array::from(vec![0, 1, 0]), values);
    schema_fault(with("rollout_id", Arc::new(ids)), &request(), "rollout_id", &["Float64", "pandas"]);
}

#[test]
fn a_null_in_a_dictionary_is_null() {
    let values: ArrayRef = Arc::new(StringArray::from(vec![Some("a"), None]));
    let ids = DictionaryArray::new(arrow_array::Int8Array::from(vec![0, 1, 0]), values);
    data_fault(with("rollout_id", Arc::new(ids)), &request(), "rollout_id", 1, &["is null"]);
}

#[test]
fn without_an_id_each_row_is_a_rollout() {
    for summary in [
        read(&[batch(without("rollout_id"))], &request()).unwrap(),
        read(&[batch(table())], &named(&[("rollout_id", None)])).unwrap(),
        read(&[batch(table())], &Request { rollout_key: vec![], ..request() }).unwrap(),
    ] {
        assert!(summary.key.is_empty());
        assert_eq!(num_rollouts(&summary), 3);
        let batch = summary.to_batch(&summary.key_names(&request())).unwrap();
        let ids = batch.column_by_name("rollout_id").unwrap().as_primitive::<Int64Type>();
        assert_eq!(ids.values().to_vec(), [0, 1, 2]);
    }
    // In every batch a new one, which may lie in another group.
    let mut columns = without("rollout_id");
    columns.push(("group_index", int64(&[7, 8, 9])));
    for batches in cuts(&batch(columns)) {
        assert_eq!(num_rollouts(&read(&batches, &with_groups()).unwrap()), 3);
    }
}

fn two_part(a: &str, b: &str) -> Request {
    Request { rollout_key: vec![a.to_owned(), b.to_owned()], groups: true, ..Request::default() }
}

#[test]
fn a_key_of_several_parts() {
    let mut columns = with("rollout_id", int64(&[1, 1, 1]));
    columns.push(("group_index", int64(&[8, 9, 8])));
    let data = batch(columns);
    says(read(std::slice::from_ref(&data), &with_groups()), &["row 1", "rollout_key="]);
    let key = two_part("group_index", "rollout_id");
    for batches in cuts(&data) {
        let summary = read(&batches, &key).unwrap();
        assert_eq!(num_rollouts(&summary), 2);
        assert_eq!(summary.key_names(&key), ["group_index", "rollout_id"]);
        let batch = summary.to_batch(&summary.key_names(&key)).unwrap();
        let names: Vec<_> = batch.schema().fields().iter().map(|f| f.name().clone()).collect();
        let fixed = ["row", "total_length", "response_length", "mask_sum"];
        assert_eq!(names[..4], fixed);
        assert_eq!(names[4..], ["group_index", "rollout_id"]);
    }
    // Any columns may be parts, and parts are never run together.
    let left: ArrayRef = Arc::new(StringArray::from(vec!["a", "ab", "a"]));
    let right: ArrayRef = Arc::new(StringArray::from(vec!["bc", "c", "bc"]));
    let mut columns = table();
    columns.push(("left", left));
    columns.push(("right", right));
    let key = Request { groups: false, ..two_part("left", "right") };
    assert_eq!(num_rollouts(&read(&[batch(columns)], &key).unwrap()), 2);
    schema_fault(table(), &key, "left", &["is missing"]);
    // A rollout is the same one in every batch, and two are two.
    let keyed = |left: &[i64], right: &[i64], groups: &[i64]| {
        let mut columns = table();
        columns.push(("left", int64(left)));
        columns.push(("right", int64(right)));
        columns.push(("group_index", int64(groups)));
        columns
    };
    let key = two_part("left", "right");
    for batches in cuts(&batch(keyed(&[1, 1, 2], &[1, 2, 1], &[7, 8, 9]))) {
        assert_eq!(num_rollouts(&read(&batches, &key).unwrap()), 3);
    }
    // A part that is called as a column of the summary is kept apart from it.
    let mut columns = table();
    columns.push(("mask_sum", int64(&[4, 4, 4])));
    columns.push(("row", int64(&[8, 9, 8])));
    let clash = Request { groups: false, ..two_part("mask_sum", "row") };
    let summary = read(&[batch(columns)], &clash).unwrap();
    let names = summary.key_names(&clash);
    let back = Summary::from_batch(&summary.to_batch(&names).unwrap(), &names, &[], Vec::new()).unwrap();
    is_in_order(&back);
    assert_eq!((num_rollouts(&summary), num_rollouts(&back)), (2, 2));
    let parts = ["left 1, right 2 is in group 9", "at row 0"];
    data_fault(keyed(&[1, 1, 1], &[2, 1, 2], &[7, 8, 9]), &key, "group_index", 2, &parts);
}

#[test]
fn a_null_in_a_key_is_one_fault() {
    let ids: ArrayRef = Arc::new(Int64Array::from(vec![Some(1), None, Some(1)]));
    data_fault(
        with("group_index", ids),
        &two_part("group_index", "rollout_id"),
        "group_index",
        1,
        &["is null"],
    );
}

#[test]
fn a_summary_goes_to_arrow_and_back() {
    let mut columns = table();
    columns.push(("group_index", int64(&[0, 0, 4])));
    let data = [batch(columns)];
    for request in
        [with_groups(), two_part("group_index", "rollout_id"), Request { groups: true, ..Request::default() }]
    {
        let summary = read(&data, &request).unwrap();
        let names = summary.key_names(&request);
        let arrow = summary.to_batch(&names).unwrap();
        let back = Summary::from_batch(&arrow, &names, &["group_index".to_owned()], Vec::new()).unwrap();
        is_in_order(&back);
        assert_eq!(back.key.len(), summary.key.len());
        for (a, b) in back.key.iter().chain(&back.group).zip(summary.key.iter().chain(&summary.group)) {
            assert_eq!(&a.values, &b.values);
        }
        assert_eq!(back.to_batch(&names).unwrap(), arrow);
    }
    let summary = read(&data, &request()).unwrap().to_batch(&["rollout_id".to_owned()]).unwrap();
    let no_group =
        Summary::from_batch(&summary, &["rollout_id".to_owned()], &["group_index".to_owned()], Vec::new());
    says(no_group, &["'group_index'", "missing from the summary"]);
    let strange = batch(vec![("row", Arc::new(StringArray::from(vec!["a"])) as ArrayRef)]);
    says(Summary::from_batch(&strange, &[], &[], Vec::new()), &["'row'", "int64"]);
}

// For all input

#[test]
fn a_mask_of_something_else_is_asked_about() {
    let hint = "; are these advantages or log-probabilities?";
    for (value, hinted) in [(-1.0, true), (0.5, true), (-0.25, true), (2.0, false), (7.0, false)] {
        let masks = ListArray::from_iter_primitive::<Float64Type, _, _>([
            Some(vec![Some(1.0)]),
            Some(vec![Some(0.0), Some(value)]),
            Some(vec![Some(1.0), Some(-0.0), Some(1.0)]),
        ]);
        let error = says(
            read(&[batch(with("loss_mask", Arc::new(masks)))], &request()),
            &["row 1: the value at position 1 is", "and a mask holds only 0 and 1"],
        );
        assert_eq!(error.to_string().ends_with(hint), hinted, "{error}");
    }
}

#[test]
fn ids_keep_one_type_over_all_batches() {
    let rows = |n: usize, ids: ArrayRef| {
        let tokens = vec![[1_i64, 2]; n];
        batch(vec![
            ("tokens", lists(&tokens.iter().map(<[i64; 2]>::as_slice).collect::<Vec<_>>())),
            ("loss_mask", lists(&vec![&[1_i64][..]; n])),
            ("rollout_id", Arc::clone(&ids)),
            ("group_index", ids),
        ])
    };
    let strings = |values: &[&str]| -> ArrayRef { Arc::new(StringArray::from(values.to_vec())) };
    for request in [request(), with_groups()] {
        let mixed = [rows(1, int64(&[1])), rows(1, strings(&["1"]))];
        let error = says(read(&mixed, &request), &["has type Utf8 here and Int64 before", "cast"]);
        assert!(matches!(error, Error::Schema { column, .. } if column == "rollout_id"));
        // A batch without rows has no ids: its type says nothing.
        let empty =
            [rows(0, strings(&[])), rows(2, int64(&[1, 2])), rows(0, strings(&[])), rows(1, int64(&[3]))];
        let summary = read(&empty, &request).unwrap();
        assert_eq!(summary.key[0].values.as_primitive::<Int64Type>().values().to_vec(), [1, 2, 3]);
    }
}

#[test]
fn ids_are_those_of_the_rows_that_are_in_order() {
    let mut columns = with("loss_mask", lists(&[&[9], &[0, 1], &[1, 0, 1]]));
    columns.push(("group_index", int64(&[3, 4, 5])));
    let (summary, found) = inspect(&[batch(columns)], &with_groups());
    assert_eq!((found.len(), summary.row.to_vec()), (1, vec![1, 2]));
    assert_eq!(summary.key[0].values.as_primitive::<Int64Type>().values().to_vec(), [6, 7]);
    assert_eq!(summary.group[0].values.as_primitive::<Int64Type>().values().to_vec(), [4, 5]);
}

#[test]
fn rows_whose_id_is_null_are_in_no_rollout_together() {
    // Were the nulls one rollout, rows 0 and 1 would lie in two groups.
    let nulls: ArrayRef = Arc::new(Int64Array::from(vec![None, None, Some(1)]));
    let mut columns = with("rollout_id", nulls.clone());
    columns.push(("group_index", int64(&[0, 1, 1])));
    let is_null = |found: &[Error], column: &str| {
        let places: Vec<_> = found.iter().map(Error::to_string).collect();
        let wanted = [0, 1].map(|row| format!("column '{column}', row {row}: is null"));
        assert_eq!(places.len(), 2, "{places:?}");
        assert!(places.iter().zip(&wanted).all(|(text, start)| text.starts_with(start)), "{places:?}");
    };
    is_null(&inspect(&[batch(columns)], &with_groups()).1, "rollout_id");
    // Also where it is a part of the key that is null.
    for key in [["run", "rollout_id"], ["rollout_id", "run"]] {
        let mut columns = with("rollout_id", int64(&[5, 5, 5]));
        columns.extend([("run", nulls.clone()), ("group_index", int64(&[0, 1, 1]))]);
        let of_runs = Request { rollout_key: key.map(str::to_owned).to_vec(), ..with_groups() };
        is_null(&inspect(&[batch(columns)], &of_runs).1, "run");
    }
}

#[test]
fn each_row_is_a_rollout_only_where_the_key_is_rollout_id_alone() {
    let plain = batch(without("rollout_id"));
    assert!(read(std::slice::from_ref(&plain), &request()).unwrap().key.is_empty());
    for (key, missing) in [(&["uid"][..], "uid"), (&["response_length", "rollout_id"], "rollout_id")] {
        let asked = Request { rollout_key: key.iter().map(|k| (*k).to_owned()).collect(), ..request() };
        let error = says(read(std::slice::from_ref(&plain), &asked), &[]);
        assert!(matches!(&error, Error::Schema { column, .. } if column == missing), "{error:?}");
    }
}

/// The faults of tokens, as `inspect` collects them: (row, text).
fn token_faults(batches: &[RecordBatch]) -> Vec<String> {
    let faults = inspect(batches, &request()).1;
    assert!(
        faults.iter().all(|f| matches!(f, Error::Data { column, .. } if column == "tokens")),
        "{faults:?}"
    );
    faults.iter().map(Error::to_string).collect()
}

#[test]
fn a_token_below_0_may_be_anywhere_but_where_it_is_trained() {
    let columns = |tokens: &[&[i64]], masks: &[&[i64]]| {
        batch(vec![("tokens", lists(tokens)), ("loss_mask", lists(masks))])
    };
    let batches = [
        columns(&[&[1, 2]], &[&[1]]),
        columns(
            // In the prompt and where the mask is 0; where it is 1; in a prompt as long as the mask; a response that is all.
            &[&[-1, 5, -2, 6], &[5, 6, -3, 7], &[-1, -1, 4, 4], &[-5, -6]],
            &[&[0, 0, 1], &[1, 1, 0], &[1, 1], &[0, 1]],
        ),
    ];
    assert_eq!(
        token_faults(&batches),
        [
            "column 'tokens', row 2: the value at position 2 is -3, and a trained token has to be from 0 to 2147483647",
            "column 'tokens', row 4: the value at position 1 is -6, and a trained token has to be from 0 to 2147483647",
        ]
    );
    // Without a mask all of the response is trained.
    let whole = batch(vec![("tokens", lists(&[&[-1, 2], &[-1, -2]])), ("response_length", int64(&[1, 1]))]);
    assert_eq!(
        token_faults(&[whole]),
        [
            "column 'tokens', row 1: the value at position 1 is -2, and a trained token has to be from 0 to 2147483647"
        ]
    );
}

#[test]
fn a_token_that_int32_cannot_hold_is_found_where_all_faults_are() {
    let (most, least) = (i64::from(i32::MAX), i64::from(i32::MIN));
    let tokens = lists(&[&[1, most], &[least, most, 3], &[7, most + 1, 3], &[least - 1, 2]]);
    let whole = batch(vec![("tokens", tokens), ("loss_mask", lists(&[&[1], &[0, 0], &[0, 0], &[1]]))]);
    assert_eq!(
        token_faults(std::slice::from_ref(&whole)),
        [
            "column 'tokens', row 2: the value at position 1 is 2147483648, and tokens have to fit an int32",
            "column 'tokens', row 3: the value at position 0 is -2147483649, and tokens have to fit an int32",
        ]
    );
    // To plan, tokens are not looked at: packing sees each of them and asks then.
    assert_eq!(read(&[whole], &request()).unwrap().mask_sum, [1, 0, 0, 1]);
}

proptest! {
    #![proptest_config(cases(200))]

    /// Sums, lengths and rows are exact whatever the types, the slices and the boundaries of batches.
    #[test]
    fn a_summary_is_exact(
        drawn in prop::collection::vec((1..5_usize, prop::collection::vec(any::<bool>(), 0..300)), 1..9),
        child in prop::sample::select(mask_types()),
        large in any::<bool>(),
        boundaries in prop::collection::vec(0..9_usize, 0..4),
        stated in any::<bool>(),
    ) {
        let masks: Vec<Vec<i64>> = drawn.iter().map(|(_, m)| m.iter().map(|b| i64::from(*b)).collect()).collect();
        let tokens: Vec<Vec<i64>> = drawn.iter().map(|(prompt, m)| vec![3; prompt + m.len()]).collect();
        let column = |rows: &[Vec<i64>]| lists(&rows.iter().map(Vec::as_slice).collect::<Vec<_>>());
        let lengths: Vec<i64> = masks.iter().map(|m| m.len() as i64).collect();
        let kind = if large {
            DataType::LargeList(Arc::new(Field::new("item", child, true)))
        } else {
            list_of(child)
        };
        let mut columns = vec![
            ("tokens", column(&tokens)),
            ("loss_mask", arrow_cast::cast(&column(&masks), &kind).unwrap()),
        ];
        if stated {
            columns.push(("response_length", int64(&lengths)));
        }
        let whole = batch(columns);
        let mut at: Vec<usize> = boundaries.iter().map(|b| (*b).min(masks.len())).collect();
        at.extend([0, masks.len()]);
        at.sort_unstable();
        let batches: Vec<_> = at.windows(2).map(|w| whole.slice(w[0], w[1] - w[0])).collect();
        let summary = read(&batches, &request()).unwrap();
        prop_assert_eq!(summary.row, (0..masks.len() as i64).collect::<Vec<_>>());
        prop_assert_eq!(summary.mask_sum, masks.iter().map(|m| m.iter().sum()).collect::<Vec<i64>>());
        prop_assert_eq!(summary.total_length, tokens.iter().map(|t| t.len() as i64).collect::<Vec<_>>());
        prop_assert_eq!(summary.response_length, lengths);
    }
}
