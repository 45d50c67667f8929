//! Summaries as they travel: what comes back from a batch, and where a row of many sources is.
#![allow(clippy::unwrap_used)] // a test that cannot go on has failed

mod common;

use common::{batch, grouped, ids, int64, lengths, request, rows, says};
use rollpack_core::Error;
use rollpack_core::columns::Request;
use rollpack_core::summary::Summary;

fn of_sources(sources: &[(&str, i64)]) -> Summary {
    let sources = sources.iter().map(|(name, rows)| ((*name).to_owned(), *rows)).collect();
    Summary { sources, ..lengths(&[3, 4, 5, 6, 7]) }
}

#[test]
fn a_row_is_counted_through_the_sources_and_within_its_own() {
    let joined = of_sources(&[("a", 2), ("b", 0), ("c", 1), ("d", 2)]);
    let places = [0, 1, 2, 3, 4, 5].map(|row| joined.place(row));
    assert_eq!(
        places,
        [
            "row 0 (row 0 of source a)",
            "row 1 (row 1 of source a)",
            "row 2 (row 0 of source c)",
            "row 3 (row 0 of source d)",
            "row 4 (row 1 of source d)",
            "row 5",
        ]
    );
    assert_eq!(of_sources(&[]).place(4), "row 4");
}

#[test]
fn a_fault_of_a_row_says_in_which_source_it_is() {
    let fault = Error::data("tokens", 3, "is null");
    let joined = of_sources(&[("a", 2), ("b", 3)]);
    let located = joined.locate(fault.clone());
    assert_eq!(located.to_string(), "column 'tokens', row 3: is null. This is row 3 (row 1 of source b)");
    assert_eq!(of_sources(&[]).locate(fault.clone()), fault, "without sources there is nothing to say");
    let plan = Error::Plan("too long".to_owned());
    assert_eq!(joined.locate(plan.clone()), plan, "and of what has no row neither");
}

#[test]
fn lengths_that_cannot_be_are_refused() {
    let read = |total: i64, response: i64, sum: i64| {
        let columns = [("row", 7), ("total_length", total), ("response_length", response), ("mask_sum", sum)];
        let columns = columns.map(|(name, value)| (name, int64(&[value])));
        Summary::from_batch(&batch(columns.to_vec()), &[], &[], Vec::new())
    };
    let most = i64::from(i32::MAX);
    for (total, response, sum) in [(1, 0, 0), (1, 1, 1), (5, 3, 2), (most, most, most)] {
        assert_eq!(read(total, response, sum).unwrap().total_length, [total]);
    }
    for (total, response, sum) in
        [(5, 3, -1), (5, 3, 4), (5, 6, 3), (0, 0, 0), (-1, -1, -1), (most + 1, 1, 1)]
    {
        let text =
            format!("a sample of {total} tokens, {response} of them the response and {sum} of these trained");
        let error = says(read(total, response, sum), &[&text, "cannot be"]);
        assert!(matches!(error, Error::Data { column, row: 7, .. } if column == "total_length"));
    }
}

#[test]
fn what_goes_into_a_batch_comes_back() {
    let plain = rows(&[(3, 2), (5, 0)]);
    let keyed = grouped(plain.clone(), &[4, 4], &[8, 8]);
    let names = |names: &[&str]| -> Vec<String> { names.iter().map(|n| (*n).to_owned()).collect() };
    for (summary, key, group) in [
        (plain, names(&[]), names(&[])),
        (keyed.clone(), names(&["rollout_id"]), names(&["group_index"])),
        (Summary { group: Vec::new(), ..keyed }, names(&["rollout_id"]), names(&[])),
    ] {
        let again = Summary::from_batch(&summary.to_batch(&key).unwrap(), &key, &group, Vec::new()).unwrap();
        assert_eq!((again.row, again.total_length), (summary.row, summary.total_length));
        assert_eq!((again.response_length, again.mask_sum), (summary.response_length, summary.mask_sum));
        assert_eq!((again.key.len(), again.group.len()), (key.len(), group.len()));
    }
}

#[test]
fn a_key_of_several_parts_goes_by_their_roles() {
    let two = Summary { key: vec![ids("run", &[1, 1]), ids("id", &[1, 2])], ..rows(&[(3, 2), (5, 0)]) };
    let key = ["group_index", "rollout_id"].map(str::to_owned).to_vec();
    assert_eq!(two.key_names(&Request { rollout_key: key.clone(), ..request() }), key);
    // A key of one part is `rollout_id`, whatever it is called, and that of rows that are rollouts has no column.
    let of_uid = Request { rollout_key: vec!["uid".to_owned()], ..request() };
    let one = grouped(rows(&[(3, 2), (5, 0)]), &[1, 2], &[]);
    assert_eq!(one.key_names(&of_uid), ["rollout_id"]);
    assert!(rows(&[(3, 2)]).key_names(&of_uid).is_empty());
}

#[test]
fn only_a_summary_without_rows_is_empty() {
    assert!(rows(&[]).is_empty());
    assert!(!rows(&[(1, 0)]).is_empty());
}
