//! The one check of input. `summarize` stops at the first fault, `inspect` collects all, `pack` asks again for each
//! row that it reads.

use std::iter::once_with;
use std::ops::Range;

use arrow_array::Array;
use arrow_array::ArrowNativeTypeOp;
use arrow_array::cast::AsArray;
use num_traits::{AsPrimitive, PrimInt};

use crate::Error;
use crate::arrays::{List, show, with_floats, with_integers, with_numbers};
use crate::columns::Samples;
use crate::error::counted;

/// Collects faults up to a limit.
#[derive(Debug)]
pub struct Faults {
    limit: usize,
    pub found: Vec<Error>,
}

impl Faults {
    pub fn new(limit: usize) -> Self {
        Self { limit, found: Vec::new() }
    }

    pub fn push(&mut self, fault: Error) {
        // A column that is missing or mistyped is so in every batch: once is enough.
        let again = matches!(fault, Error::Schema { .. }) && self.found.contains(&fault);
        if !self.is_full() && !again {
            self.found.push(fault);
        }
    }

    pub fn is_full(&self) -> bool {
        self.found.len() >= self.limit
    }

    /// The value, or a fault and nothing.
    pub fn keep<T>(&mut self, result: crate::Result<T>) -> Option<T> {
        result.map_err(|fault| self.push(fault)).ok()
    }
}

/// A sample that was found to be in order.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Row {
    /// Where its tokens lie among the values of the tokens column.
    pub tokens: Range<usize>,
    /// Where its mask lies among the values of the mask column; without a mask every response token is trained.
    pub mask: Option<Range<usize>>,
    pub response: usize,
    pub mask_sum: i64,
}

impl Row {
    pub fn total(&self) -> usize {
        self.tokens.len()
    }

    pub fn prompt(&self) -> usize {
        self.total() - self.response
    }
}

impl Samples {
    /// Checks row `i` of this batch. Everything that is wrong with it becomes a fault.
    pub fn check(&self, i: usize, faults: &mut Faults) -> Option<Row> {
        let row = self.first_row + i as i64;
        let before = faults.found.len();
        let group = self.group.iter().filter(|g| self.key.iter().all(|k| k.name != g.name));
        for ids in self.key.iter().chain(group) {
            if ids.values.is_null(i) {
                faults.push(Error::data(
                    &ids.name,
                    row,
                    "is null, and an id cannot be made up; fill it or drop the row",
                ));
            }
        }
        let tokens = list_at(&self.tokens, i, row, faults);
        if tokens.as_ref().is_some_and(Range::is_empty) {
            faults.push(Error::data(&self.tokens.name, row, "the sequence is empty; drop the row"));
        }
        let mask = self.loss_mask.as_ref().map(|m| list_at(m, i, row, faults));
        let stated = match &self.response_length {
            None => None,
            Some(lengths) if lengths.is_null(i) => {
                faults.push(Error::data(&lengths.name, row, "is null; fill it or drop the row"));
                return None;
            }
            Some(lengths) => Some(lengths.value(i)),
        };
        let tokens = tokens?;
        let mask = match mask {
            Some(None) => return None,
            Some(Some(range)) => Some(range),
            None => None,
        };
        let response = self.response(i, row, &tokens, mask.as_ref(), stated, faults);
        let sum = match (&self.loss_mask, &mask) {
            (Some(list), Some(range)) => mask_sum(list, range, row, faults),
            _ => response.map(|n| n as i64),
        };
        let (response, mask_sum) = (response?, sum?);
        if response == tokens.len() && response > 0 && self.first_is_trained(mask.as_ref()) {
            let (name, fix) = match &self.loss_mask {
                Some(list) => (list.name.as_str(), "set the first mask value to 0"),
                None => (self.response_name(), "give a loss_mask whose first value is 0"),
            };
            faults.push(Error::data(
                name,
                row,
                format!(
                    "the token at position 0 of the sequence is trained, but no logit predicts it; {fix}"
                ),
            ));
        }
        // Packing sees every token and asks then; where all faults are collected, they are looked for now.
        if faults.limit > 1 {
            let found = Row { tokens: tokens.clone(), mask: mask.clone(), response, mask_sum };
            faults.found.extend(self.token_fault(i, &found));
        }
        // Made at the end, as a copy of what was just written in parts would wait for it: a twentieth of a short row's time.
        (faults.found.len() == before).then_some(Row { tokens, mask, response, mask_sum })
    }

    /// What is wrong with a token of row `i`: as int32 it would be another, or as a label be ignored without a word.
    pub fn token_fault(&self, i: usize, row: &Row) -> Option<Error> {
        let values = &self.tokens.values;
        let (prompt, first) = (row.prompt(), row.tokens.start);
        let is_trained = |at: usize| {
            at >= prompt
                && match (&self.loss_mask, &row.mask) {
                    (Some(list), Some(range)) => list.is_one(range.start + at - prompt),
                    _ => true,
                }
        };
        let (at, why) = with_integers!(
            values,
            v => v[row.tokens.clone()].iter().enumerate().find_map(|(at, x)| match i32::try_from(*x) {
                Err(_) => Some((at, "and tokens have to fit an int32")),
                Ok(token) if token < 0 && is_trained(at) => {
                    Some((at, "and a trained token has to be from 0 to 2147483647"))
                }
                Ok(_) => None,
            }),
            _ => None
        )?;
        let message = format!("the value at position {at} is {}, {why}", show(values, first + at));
        Some(Error::data(&self.tokens.name, self.first_row + i as i64, message))
    }

    pub(crate) fn response_name(&self) -> &str {
        self.response_length.as_ref().map_or("response_length", |l| &l.name)
    }

    /// The number of response tokens. `stated`: what `response_length` says.
    fn response(
        &self,
        i: usize,
        row: i64,
        tokens: &Range<usize>,
        mask: Option<&Range<usize>>,
        stated: Option<i64>,
        faults: &mut Faults,
    ) -> Option<usize> {
        let total = tokens.len();
        let Some(stated) = stated else {
            let mask = mask?;
            if mask.len() <= total {
                return Some(mask.len());
            }
            let name = self.loss_mask.as_ref().map_or("loss_mask", |m| &m.name);
            faults.push(Error::data(
                name,
                row,
                format!(
                    "the mask has {}, and the whole sequence only {}",
                    counted(mask.len(), "value"),
                    counted(total, "token")
                ),
            ));
            return None;
        };
        let Some(response) = usize::try_from(stated).ok().filter(|n| *n <= total) else {
            let shown = self.response_length.as_ref().map_or_else(String::new, |l| l.show(i));
            let wrong = if stated < 0 {
                "is negative".to_owned()
            } else {
                format!("is larger than the sequence, which has {}", counted(total, "token"))
            };
            faults.push(Error::data(self.response_name(), row, format!("{shown} {wrong}")));
            return None;
        };
        if let (Some(list), Some(mask)) = (&self.loss_mask, mask)
            && mask.len() != response
        {
            let found = mask.len();
            let name = self.response_name();
            let why = if found == total {
                format!(
                    ": it covers prompt and response. That is legal where {name} is left out: pass \
                     columns={{\"response_length\": None}}, or cut the mask to the response"
                )
            } else {
                "; they have to be equal".to_owned()
            };
            faults.push(Error::data(
                &list.name,
                row,
                format!("the mask has {} and {name} is {response}{why}", counted(found, "value")),
            ));
            return None;
        }
        Some(response)
    }

    fn first_is_trained(&self, mask: Option<&Range<usize>>) -> bool {
        match (&self.loss_mask, mask) {
            (Some(list), Some(range)) => list.is_one(range.start),
            _ => true,
        }
    }
}

impl List {
    /// Whether this value of a mask is 1.
    fn is_one(&self, at: usize) -> bool {
        let values = &self.values;
        with_numbers!(values, v => is_one(v[at]), bits => bits.value(at))
    }
}

/// Written with `==`, which a float's total order is not: -0.0 is a 0.
#[allow(clippy::float_cmp)] // a mask holds exactly 0 and 1
pub fn is_one<N: ArrowNativeTypeOp>(x: N) -> bool {
    x == N::ONE
}

fn list_at(list: &List, i: usize, row: i64, faults: &mut Faults) -> Option<Range<usize>> {
    list.range_without_null(i).map_err(|message| faults.push(Error::data(&list.name, row, message))).ok()
}

/// The sum of a mask, or a fault where a value is neither 0 nor 1.
fn mask_sum(list: &List, range: &Range<usize>, row: i64, faults: &mut Faults) -> Option<i64> {
    let values = &list.values;
    let (sum, valid) = with_integers!(
        values,
        v => count_ones(&v[range.clone()], integers),
        _ => with_floats!(
            values,
            v => count_ones(&v[range.clone()], floats),
            b => (b.slice(range.start, range.len()).count_set_bits() as i64, true)
        )
    );
    if valid {
        return Some(sum);
    }
    let wrong = with_numbers!(
        values,
        v => v[range.clone()].iter().position(|x| !is_bit(*x)),
        _b => None
    )?;
    let value = show(values, range.start + wrong);
    let other = value.parse::<f64>().is_ok_and(|v| v < 0.0 || v.fract() != 0.0);
    let hint = if other { "; are these advantages or log-probabilities?" } else { "" };
    faults.push(Error::data(
        &list.name,
        row,
        format!("the value at position {wrong} is {value}, and a mask holds only 0 and 1{hint}"),
    ));
    None
}

fn is_bit<N: ArrowNativeTypeOp>(x: N) -> bool {
    x == N::ZERO || is_one(x)
}

/// How many values are 1, and whether the others are 0. `count` says so of at most [`CHUNK`] of them.
fn count_ones<N>(values: &[N], count: impl Fn(&[N]) -> (u8, bool)) -> (i64, bool) {
    let (chunks, rest) = values.as_chunks::<CHUNK>();
    // In the order of memory, which is what it is read ahead in.
    let counts = chunks.iter().map(|chunk| count(chunk)).chain(once_with(|| count(rest)));
    counts.fold((0, true), |(sum, all_valid), (ones, valid)| (sum + i64::from(ones), all_valid & valid))
}

/// A chunk's count fits a byte, and its length is known: so it becomes vector code without a rest.
const CHUNK: usize = 128;

/// Integers are 0 or 1 where none has another bit, and then their sum is the count: two operations for each.
fn integers<N: PrimInt + AsPrimitive<u8>>(chunk: &[N]) -> (u8, bool) {
    let (sum, bits) =
        chunk.iter().fold((0u8, N::zero()), |(sum, bits), x| (sum.wrapping_add(x.as_()), bits | *x));
    (sum, bits == N::zero() || bits == N::one())
}

fn floats<N: ArrowNativeTypeOp>(chunk: &[N]) -> (u8, bool) {
    chunk.iter().fold((0, true), |(ones, valid), &x| (ones + u8::from(is_one(x)), valid & is_bit(x)))
}
