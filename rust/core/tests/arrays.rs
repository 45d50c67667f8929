//! Types of columns that are rare, or that nobody chose: what is read, and what is advised.
#![allow(clippy::unwrap_used, clippy::panic)] // a test that cannot go on has failed

mod common;

use std::sync::Arc;

use arrow_array::{
    Array, ArrayRef, BooleanArray, Decimal128Array, FixedSizeListArray, Float64Array, ListArray, NullArray,
    StringArray, StructArray,
};
use arrow_buffer::NullBuffer;
use arrow_schema::{DataType, Field};
use common::{batch, int64, lists, read, request, says};
use rollpack_core::Error;

/// The error of three rows with this column in place of one that is in order; it names the column.
#[track_caller]
fn refused(name: &str, array: ArrayRef, parts: &[&str]) -> Error {
    let mut columns = vec![
        ("tokens", lists(&[&[1, 2, 3], &[4, 5, 6], &[7, 8, 9, 10]])),
        ("response_length", int64(&[1, 2, 3])),
        ("loss_mask", lists(&[&[1], &[0, 1], &[1, 0, 1]])),
        ("rollout_id", int64(&[5, 6, 7])),
    ];
    columns.retain(|(column, _)| *column != name);
    columns.push((name, array));
    let error = says(read(&[batch(columns)], &request()), parts);
    let (Error::Schema { column, .. } | Error::Data { column, .. }) = &error else { panic!("{error:?}") };
    assert_eq!(column, name);
    error
}

fn one_text() -> ArrayRef {
    Arc::new(StringArray::from(vec!["1", "2", "3"]))
}

fn decimals(values: impl IntoIterator<Item = i128>) -> ArrayRef {
    Arc::new(Decimal128Array::from_iter_values(values).with_precision_and_scale(38, 0).unwrap())
}

/// Rows of decimals, one each.
fn lists_of_decimals() -> ArrayRef {
    let field = Arc::new(Field::new("item", DataType::Decimal128(38, 0), true));
    let offsets = arrow_buffer::OffsetBuffer::from_lengths([1, 1, 1]);
    Arc::new(ListArray::new(field, offsets, decimals([1, 1, 1]), None))
}

#[test]
fn each_type_that_nobody_chose_has_its_own_advice() {
    let floats: ArrayRef = Arc::new(Float64Array::from(vec![1.0; 3]));
    refused(
        "loss_mask",
        Arc::new(NullArray::new(3)),
        &["every value is null", "columns={\"loss_mask\": None}"],
    );
    refused("tokens", one_text(), &["has type Utf8", "it holds text; parse it where the data is made"]);
    refused("response_length", one_text(), &["it holds text"]);
    refused("loss_mask", lists_of_decimals(), &["a list of 0 and 1", "::BIGINT"]);
    refused("response_length", decimals([1, 2, 3]), &["DuckDB", "::BIGINT"]);
    refused("rollout_id", floats, &["as a float cannot tell large ids apart", "fill the gaps"]);
    let error =
        refused("rollout_id", Arc::new(BooleanArray::from(vec![true; 3])), &["; cast it to one of these"]);
    assert!(!error.to_string().contains("float"), "{error}");
}

#[test]
fn ids_that_are_all_null_are_missed_where_there_are_rows() {
    refused("rollout_id", Arc::new(NullArray::new(3)), &["row 0", "every value", "cannot be made up"]);
    let none = vec![
        ("tokens", lists(&[])),
        ("loss_mask", lists(&[])),
        ("rollout_id", Arc::new(NullArray::new(0)) as ArrayRef),
    ];
    says(read(&[batch(none)], &request()), &["no rows"]);
}

/// Lists of no values, three rows.
fn fixed_size_0(child: DataType) -> ArrayRef {
    let values = arrow_array::new_empty_array(&child);
    let field = Arc::new(Field::new("item", child, true));
    Arc::new(FixedSizeListArray::try_new_with_length(field, 0, values, None, 3).unwrap())
}

#[test]
fn lists_of_a_fixed_size_of_0_are_as_many_empty_responses() {
    for child in [DataType::Int64, DataType::Boolean, DataType::Null] {
        let columns =
            vec![("tokens", lists(&[&[1, 2], &[3], &[4, 5, 6]])), ("loss_mask", fixed_size_0(child))];
        let summary = read(&[batch(columns)], &request()).unwrap();
        assert_eq!(summary.total_length, [2, 1, 3]);
        assert_eq!(summary.response_length, [0, 0, 0]);
        assert_eq!(summary.mask_sum, [0, 0, 0]);
    }
}

/// Ray's arrays of any shape: the values of each row in one list, and its shape.
fn ragged(data: ArrayRef, shape: ArrayRef, nulls: Option<NullBuffer>) -> ArrayRef {
    let field = |name, array: &ArrayRef| Arc::new(Field::new(name, array.data_type().clone(), true));
    let fields = vec![field("data", &data), field("shape", &shape)];
    Arc::new(StructArray::new(fields.into(), vec![data, shape], nulls))
}

#[test]
fn ragged_arrays_of_one_dimension_are_lists() {
    let mask = |shape| ragged(lists(&[&[1], &[0, 1], &[1, 0, 1]]), shape, None);
    let columns =
        |mask| vec![("tokens", lists(&[&[1, 2, 3], &[4, 5, 6], &[7, 8, 9, 10]])), ("loss_mask", mask)];
    let summary = read(&[batch(columns(mask(lists(&[&[1], &[2], &[3]]))))], &request()).unwrap();
    assert_eq!(summary.response_length, [1, 2, 3]);
    assert_eq!(summary.mask_sum, [1, 1, 2]);
    refused("loss_mask", mask(lists(&[&[1], &[2, 1], &[3]])), &["arrays of 2 dimensions", "one flat list"]);
    refused("loss_mask", mask(lists(&[&[1], &[], &[3]])), &["arrays of 0 dimensions"]);
}

#[test]
fn a_null_among_ragged_arrays_is_a_null_of_any_shape() {
    let nulls = NullBuffer::from(vec![true, false, true]);
    for shape in [lists(&[&[1], &[], &[3]]), lists(&[&[1], &[1, 1], &[3]]), lists(&[&[1], &[2], &[3]])] {
        let mask = ragged(lists(&[&[1], &[0, 1], &[1, 0, 1]]), shape, Some(nulls.clone()));
        refused("loss_mask", mask, &["row 1", "is null"]);
    }
}

#[test]
fn another_struct_is_no_list() {
    let data = lists(&[&[1], &[0, 1], &[1, 0, 1]]);
    let field = |name, array: &ArrayRef| Arc::new(Field::new(name, array.data_type().clone(), true));
    // A shape that is one number, and a third field beside the two.
    refused(
        "loss_mask",
        ragged(Arc::clone(&data), int64(&[1, 2, 3]), None),
        &["has type Struct", "a list of 0 and 1"],
    );
    let shape = lists(&[&[1], &[2], &[3]]);
    let fields = vec![field("data", &data), field("shape", &shape), field("more", &data)];
    let three = StructArray::new(fields.into(), vec![Arc::clone(&data), shape, data], None);
    refused("loss_mask", Arc::new(three), &["has type Struct", "a list of 0 and 1"]);
}
