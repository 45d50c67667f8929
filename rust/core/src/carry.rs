//! Columns that travel along: a number for each response token, or one a sample.

use std::ops::Range;

use arrow_array::Array;
use arrow_array::cast::AsArray;
use num_traits::AsPrimitive;

use crate::arrays::{List, Scalars, show, with_integers, with_numbers};
use crate::check::Row;
use crate::error::counted;
use crate::pack::Aligned;
use crate::{Error, Result};

/// Carries a token column: at each position the value of the token after it, 0 where that is no response token.
pub(crate) fn carry(
    list: &List,
    row_number: i64,
    i: usize,
    row: &Row,
    run: &Range<usize>,
    to: &mut [f32],
) -> Result<()> {
    let fault = |message: String| Error::data(&list.name, row_number, message);
    let range = list.range_without_null(i).map_err(fault)?;
    if range.len() != row.response {
        return Err(fault(format!(
            "the list has {} and the response {}",
            counted(range.len(), "value"),
            counted(row.response, "token")
        )));
    }
    let aligned = Aligned::new(row, run);
    to[..aligned.to.start].fill(0.0);
    to[aligned.to.end..].fill(0.0);
    let to = &mut to[aligned.to];
    let from = range.start + aligned.from.start..range.start + aligned.from.end;
    let values = &list.values;
    with_numbers!(
        values,
        v => for (to, x) in to.iter_mut().zip(&v[from.clone()]) { *to = x.as_(); },
        bits => for (to, bit) in to.iter_mut().zip(&bits.slice(from.start, from.len())) { *to = f32::from(u8::from(bit)); }
    );
    let overflows = |x: f64| x.is_finite() && x.abs() > f64::from(f32::MAX);
    let at = |i: usize| {
        format!("the value at position {} is {}", aligned.from.start + i, show(values, from.start + i))
    };
    if to.iter().any(|x| x.is_infinite())
        && let Some(i) =
            with_numbers!(values, v => v[from.clone()].iter().position(|x| overflows(x.as_())), _bits => None)
    {
        return Err(fault(format!("{}, too large for a float32", at(i))));
    }
    // In float64: as float32 the first integer that is rounded looks like the last that is not.
    let inexact = |x: f64| x.abs() > 16_777_216.0; // 2^24
    if let Some(i) =
        with_integers!(values, v => v[from.clone()].iter().position(|x| inexact(x.as_())), _ => None)
    {
        return Err(fault(format!(
            "{}, which a float32 cannot hold exactly; cast the column to float to have it rounded",
            at(i)
        )));
    }
    Ok(())
}

/// The value of a sample column, NaN for a null.
pub(crate) fn scalar(column: &Scalars, first_row: i64, i: usize, single: bool) -> Result<f64> {
    let values = &column.values;
    if values.is_null(i) {
        return Ok(f64::NAN);
    }
    let value: f64 = with_numbers!(values, v => v[i].as_(), bits => f64::from(u8::from(bits.value(i))));
    let exact = if single { 1 << 24 } else { 1 << 53 };
    let inexact = |x: i128| x.unsigned_abs() > exact;
    if with_integers!(values, v => inexact(v[i].as_()), _ => false) {
        return Err(Error::data(
            &column.name,
            first_row + i as i64,
            format!(
                "{} is an integer that a float cannot hold exactly; carry a smaller number",
                show(values, i)
            ),
        ));
    }
    if single && value.is_finite() && value.abs() > f64::from(f32::MAX) {
        let message = format!("{} is too large for a float32", show(values, i));
        return Err(Error::data(&column.name, first_row + i as i64, message));
    }
    Ok(value)
}
