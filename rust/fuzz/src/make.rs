//! Columns of arbitrary bytes, each as plain values and as Arrow.

use std::sync::Arc;

use arbitrary::{Result, Unstructured};
use arrow_array::types::Int64Type;
use arrow_array::{Array, ArrayRef, ListArray, StructArray, make_array};
use arrow_buffer::{BooleanBuffer, Buffer, NullBuffer, ToByteSlice};
use arrow_data::ArrayData;
use arrow_schema::{DataType, Field};

/// An array that is not printed: what is in it may be unsound.
struct Arrow(ArrayRef);

impl std::fmt::Debug for Arrow {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}", self.0.data_type())
    }
}

#[derive(Debug)]
pub struct Batch {
    pub num_rows: usize,
    pub tokens: List,
    pub mask: Option<List>,
    pub length: Option<Numbers>,
    pub ids: Option<Ids>,
}

impl Batch {
    pub fn columns(&self) -> Vec<(&'static str, ArrayRef)> {
        let mut columns = vec![("tokens", Arc::clone(&self.tokens.arrow.0))];
        columns.extend(self.mask.iter().map(|c| ("loss_mask", Arc::clone(&c.arrow.0))));
        columns.extend(self.length.iter().map(|c| ("response_length", Arc::clone(&c.arrow.0))));
        columns.extend(self.ids.iter().map(|c| ("rollout_id", Arc::clone(&c.arrow.0))));
        columns
    }
}

/// A list column: row i is `values[starts[i]..ends[i]]`.
#[derive(Debug)]
pub struct List {
    pub starts: Vec<i64>,
    pub ends: Vec<i64>,
    pub valid: Vec<bool>,
    pub values: Numbers,
    /// Whether it says how many nulls there are, if anything.
    pub counted: bool,
    /// Whether offsets have to follow each other.
    pub consecutive: bool,
    arrow: Arrow,
}

pub struct Numbers {
    pub values: Vec<Option<f64>>,
    pub counted: bool,
    arrow: Arrow,
}

impl std::fmt::Debug for Numbers {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let texts = self.values.iter().map(|v| v.map_or("null".to_owned(), |v| v.to_string()));
        write!(f, "{:?} [{}] counted: {}", self.arrow, texts.collect::<Vec<_>>().join(" "), self.counted)
    }
}

#[derive(Debug)]
pub struct Ids {
    /// None: the column is not sound.
    pub values: Option<Vec<Option<String>>>,
    pub counted: bool,
    arrow: Arrow,
}

/// The types of a column's batches.
#[derive(Debug, Clone, Copy)]
struct Kinds {
    tokens: (u8, u8),
    mask: Option<(u8, u8)>,
    length: Option<u8>,
    ids: Option<u8>,
}

/// One to three batches of the same types.
pub fn batches(u: &mut Unstructured<'_>) -> Result<Vec<Batch>> {
    let mut optional = |limit: u8| -> Result<Option<u8>> {
        let kind = u.int_in_range(0..=limit)?;
        Ok((kind > 0).then(|| kind - 1))
    };
    let kinds = Kinds {
        tokens: (optional(6)?.unwrap_or(0), optional(8)?.unwrap_or(0)),
        mask: optional(6)?.map(|list| Ok((list, optional(11)?.unwrap_or(0)))).transpose()?,
        length: optional(8)?,
        ids: optional(8)?,
    };
    (0..u.int_in_range(1..=3)?).map(|_| batch(u, kinds)).collect()
}

/// Mostly false.
fn rarely(u: &mut Unstructured<'_>) -> Result<bool> {
    Ok(u.int_in_range(0..=15)? == 15_u8)
}

fn batch(u: &mut Unstructured<'_>, kinds: Kinds) -> Result<Batch> {
    let num_rows = u.int_in_range(0..=4)?;
    // A response of each row first, so that columns mostly fit together.
    let shape = (0..num_rows)
        .map(|_| Ok((u.int_in_range(0..=3)?, u.int_in_range(0..=4)?)))
        .collect::<Result<Vec<(i64, i64)>>>()?;
    let responses: Vec<i64> = shape.iter().map(|(_, response)| *response).collect();
    let totals: Vec<i64> = shape.iter().map(|(prompt, response)| prompt + response).collect();
    Ok(Batch {
        num_rows,
        tokens: list(u, kinds.tokens, &totals, false)?,
        mask: kinds.mask.map(|kind| list(u, kind, &responses, true)).transpose()?,
        length: kinds
            .length
            .map(|kind| {
                let mut values: Vec<f64> = responses.iter().map(|n| *n as f64).collect();
                if rarely(u)? && num_rows > 0 {
                    values[u.choose_index(num_rows)?] = f64::from(u.arbitrary::<i16>()?);
                }
                numbers(u, kind, values)
            })
            .transpose()?,
        ids: kinds.ids.map(|kind| ids(u, kind, num_rows)).transpose()?,
    })
}

/// Which of `n` are valid, and the bitmap of that behind `offset` other rows, with a count that may be wrong.
struct Nulls {
    valid: Vec<bool>,
    counted: bool,
    bitmap: Option<(Buffer, usize)>,
}

fn nulls(u: &mut Unstructured<'_>, n: usize, offset: usize) -> Result<Nulls> {
    if !rarely(u)? {
        return Ok(Nulls { valid: vec![true; n], counted: true, bitmap: None });
    }
    let all = (0..offset + n).map(|_| Ok(!rarely(u)?)).collect::<Result<Vec<bool>>>()?;
    let valid = all[offset..].to_vec();
    let right = valid.iter().filter(|v| !**v).count();
    // 0 would have arrow-rs take the bitmap away, as the format says; the binding has nulls counted anew.
    let count = if rarely(u)? { u.int_in_range(1..=5)? } else { right };
    let bitmap = BooleanBuffer::from(all).into_inner();
    Ok(Nulls { valid, counted: count == right, bitmap: Some((bitmap, count)) })
}

/// As the C data interface hands it over: nothing is checked.
#[allow(unsafe_code)]
fn unchecked(
    data_type: DataType,
    len: usize,
    offset: usize,
    nulls: &Nulls,
    buffers: Vec<Buffer>,
    children: Vec<ArrayData>,
) -> ArrayRef {
    let (bitmap, count) = nulls.bitmap.clone().unzip();
    // SAFETY: none is claimed. That unsound data is refused before it is used is what is tested here.
    let data = unsafe { ArrayData::new_unchecked(data_type, len, count, bitmap, offset, buffers, children) };
    make_array(data)
}

fn buffer<T: ToByteSlice + Copy>(values: impl IntoIterator<Item = T>) -> Buffer {
    let bytes = values.into_iter().flat_map(|v| v.to_byte_slice().to_vec()).collect::<Vec<u8>>();
    // Aligned anew: a vector of bytes need not be.
    let mut aligned = arrow_buffer::MutableBuffer::new(bytes.len());
    aligned.extend_from_slice(&bytes);
    aligned.into()
}

/// Values as type number `kind`: eight integers, two floats, booleans. What does not fit becomes what does.
fn numbers(u: &mut Unstructured<'_>, kind: u8, values: Vec<f64>) -> Result<Numbers> {
    let offset = u.int_in_range(0..=2)?;
    let nulls = nulls(u, values.len(), offset)?;
    let all: Vec<f64> = std::iter::repeat_n(1.0, offset).chain(values).collect();
    macro_rules! typed {
        ($T:ty, $D:ident) => {{
            let cast: Vec<$T> = all.iter().map(|v| *v as $T).collect();
            #[allow(clippy::cast_lossless)] // in a macro over all types
            (DataType::$D, cast.iter().map(|v| *v as f64).collect(), buffer(cast))
        }};
    }
    let (data_type, plain, buffer): (_, Vec<f64>, _) = match kind {
        0 => typed!(i8, Int8),
        1 => typed!(i16, Int16),
        2 => typed!(i32, Int32),
        3 => typed!(i64, Int64),
        4 => typed!(u8, UInt8),
        5 => typed!(u16, UInt16),
        6 => typed!(u32, UInt32),
        7 => typed!(u64, UInt64),
        8 => typed!(f32, Float32),
        9 => typed!(f64, Float64),
        _ => {
            let bits: Vec<bool> = all.iter().map(|v| *v != 0.0).collect();
            let plain = bits.iter().map(|b| f64::from(u8::from(*b))).collect();
            (DataType::Boolean, plain, BooleanBuffer::from(bits).into_inner())
        }
    };
    let arrow = unchecked(data_type, nulls.valid.len(), offset, &nulls, vec![buffer], Vec::new());
    let values = plain[offset..].iter().zip(&nulls.valid).map(|(v, valid)| valid.then_some(*v)).collect();
    Ok(Numbers { values, counted: nulls.counted, arrow: Arrow(arrow) })
}

/// Lists of these lengths, mostly. `kind`: of list, and of element.
#[allow(clippy::too_many_lines)] // a match over the kinds of list
fn list(u: &mut Unstructured<'_>, kind: (u8, u8), lengths: &[i64], bits: bool) -> Result<List> {
    let rows = lengths.len();
    let offset = u.int_in_range(0..=1)?; // a slice
    let before = u.int_in_range(0..=2)?; // values that no row has
    let fixed = (kind.0 == 2).then(|| lengths.first().copied().unwrap_or(1));
    let mut ends: Vec<i64> = vec![before; offset];
    let mut at = if fixed.is_some() { 0 } else { before };
    let first = at;
    for length in lengths {
        at += fixed.unwrap_or(*length);
        ends.push(at);
    }
    let mut starts: Vec<i64> =
        std::iter::once(first).chain(ends[offset..].iter().copied()).take(rows).collect();
    let mut ends = ends.split_off(offset);
    let behind = u.int_in_range(0..=2)?;
    let count = at + behind;
    let values = (0..count)
        .map(|_| match (bits, rarely(u)?) {
            (true, false) => Ok(f64::from(u8::from(u.arbitrary::<bool>()?))),
            (false, false) => Ok(f64::from(u.arbitrary::<u8>()?)),
            (_, true) => Ok(f64::from(u.arbitrary::<i32>()?) * if u.arbitrary()? { 1.0 } else { 4.5 }),
        })
        .collect::<Result<Vec<f64>>>()?;
    let values = numbers(u, kind.1, values)?;
    if fixed.is_some() && !values.counted {
        return Err(arbitrary::Error::IncorrectFormat); // arrow-rs slices the values, and counts anew
    }
    let nulls = nulls(u, rows, offset)?;
    // One offset is changed, to anything or to something near.
    let changed =
        if fixed.is_none() && rarely(u)? && rows > 0 { Some(u.choose_index(rows + 1)?) } else { None };
    let to = if rarely(u)? { i64::from(u.arbitrary::<i32>()?) } else { u.int_in_range(-2..=20)? };
    let view = matches!(kind.0, 3 | 4);
    if let Some(i) = changed {
        if view {
            let i = i.min(rows - 1);
            if u.arbitrary()? {
                ends[i] = starts[i] + to;
            } else {
                (starts[i], ends[i]) = (to, to + ends[i] - starts[i]);
            }
        } else {
            starts.iter_mut().skip(i).take(1).for_each(|s| *s = to);
            ends.iter_mut().take(i).skip(i.wrapping_sub(1)).take(1).for_each(|e| *e = to);
        }
    }
    let offsets: Vec<i64> = std::iter::repeat_n(first, offset)
        .chain(starts.iter().copied())
        .chain(ends.last().copied().or(Some(first)))
        .collect();
    let small = || offsets.iter().map(|o| *o as i32).collect::<Vec<_>>();
    let field = Arc::new(Field::new("l", values.arrow.0.data_type().clone(), true));
    let child = values.arrow.0.to_data();
    let sizes = || std::iter::repeat_n(0, offset).chain(starts.iter().zip(&ends).map(|(s, e)| e - s));
    let starts_only = || offsets[..offset + rows].iter().copied();
    let build = |data_type, buffers| unchecked(data_type, rows, offset, &nulls, buffers, vec![child.clone()]);
    let arrow = match kind.0 {
        0 => build(DataType::List(field), vec![buffer(small())]),
        1 => build(DataType::LargeList(field), vec![buffer(offsets.clone())]),
        2 => {
            // No rows before: their values would have to be there.
            let size = fixed.unwrap_or(1) as i32;
            let data_type = DataType::FixedSizeList(field, size);
            let flat = Nulls {
                valid: nulls.valid.clone(),
                counted: nulls.counted,
                bitmap: nulls
                    .bitmap
                    .as_ref()
                    .map(|(_, count)| (BooleanBuffer::from(nulls.valid.clone()).into_inner(), *count)),
            };
            unchecked(data_type, rows, 0, &flat, Vec::new(), vec![child.clone()])
        }
        3 => build(
            DataType::ListView(field),
            vec![buffer(starts_only().map(|o| o as i32)), buffer(sizes().map(|s| s as i32))],
        ),
        4 => build(DataType::LargeListView(field), vec![buffer(starts_only()), buffer(sizes())]),
        _ => {
            // As Ray Data has ragged arrays.
            let data = build(DataType::LargeList(field), vec![buffer(offsets.clone())]);
            let shape: ArrayRef = Arc::new(ListArray::from_iter_primitive::<Int64Type, _, _>(
                (0..rows).map(|_| Some([Some(1)])),
            ));
            let fields = vec![
                Field::new("data", data.data_type().clone(), true),
                Field::new("shape", shape.data_type().clone(), true),
            ];
            let missing: Option<NullBuffer> = None;
            match StructArray::try_new(fields.into(), vec![data, shape], missing) {
                Ok(rows) => Arc::new(rows),
                Err(_) => return Err(arbitrary::Error::IncorrectFormat),
            }
        }
    };
    Ok(List {
        starts,
        ends,
        valid: nulls.valid,
        values,
        counted: nulls.counted,
        consecutive: !view,
        arrow: Arrow(arrow),
    })
}

/// Ids of type number `kind`: integers, strings, binary, dictionaries, runs.
fn ids(u: &mut Unstructured<'_>, kind: u8, rows: usize) -> Result<Ids> {
    let names = ["a", "", "Ω", "a string that is too long for a view"];
    let which = (0..rows).map(|_| u.choose_index(names.len())).collect::<Result<Vec<_>>>()?;
    if kind < 2 {
        let column = numbers(u, if kind == 0 { 3 } else { 6 }, which.iter().map(|i| *i as f64).collect())?;
        let text = column.values.iter().map(|v| v.map(|v| format!("{v}"))).collect();
        return Ok(Ids { values: Some(text), counted: column.counted, arrow: column.arrow });
    }
    let chosen: Vec<&str> = which.iter().map(|i| names[*i]).collect();
    let quoted = |s: &str| format!("'{s}'");
    let none = Nulls { valid: Vec::new(), counted: true, bitmap: None };
    if kind >= 6 {
        let mut keys: Vec<i8> = which.iter().map(|i| *i as i8).collect();
        if rarely(u)? && rows > 0 {
            keys[u.choose_index(rows)?] = u.arbitrary()?;
        }
        let (_, dictionary) = strings(&names, 0, None);
        let values = unchecked(DataType::Utf8, names.len(), 0, &none, dictionary, Vec::new());
        let nulls = nulls(u, rows, 0)?;
        let text = |(key, valid): (&i8, &bool)| -> Option<Option<String>> {
            let found = usize::try_from(*key).ok().and_then(|k| names.get(k));
            if *valid { found.map(|s| Some(quoted(s))) } else { Some(None) }
        };
        let plain = keys.iter().zip(&nulls.valid).map(text).collect();
        let data_type = DataType::Dictionary(Box::new(DataType::Int8), Box::new(DataType::Utf8));
        let arrow = unchecked(data_type, rows, 0, &nulls, vec![buffer(keys)], vec![values.to_data()]);
        return Ok(Ids { values: plain, counted: nulls.counted, arrow: Arrow(arrow) });
    }
    let nulls = nulls(u, rows, 0)?;
    let changed = if rarely(u)? && rows > 0 {
        Some((u.choose_index(rows + 1)?, u.int_in_range(-3..=60)?))
    } else {
        None
    };
    let (offsets, buffers) = strings(&chosen, kind, changed);
    let data_type = [DataType::Utf8, DataType::LargeUtf8, DataType::Binary, DataType::LargeBinary]
        [usize::from(kind - 2)]
    .clone();
    let size = buffers[1].len() as i64;
    let sound = offsets.windows(2).all(|w| w[0] <= w[1]) && offsets.iter().all(|o| (0..=size).contains(o));
    let bytes = buffers[1].to_vec();
    let text = |i: usize| -> Option<String> {
        let bytes = &bytes[offsets[i] as usize..offsets[i + 1] as usize];
        if kind >= 4 {
            return Some(
                bytes
                    .iter()
                    .flat_map(|b| [b >> 4, b & 15])
                    .filter_map(|d| char::from_digit(d.into(), 16))
                    .collect(),
            );
        }
        std::str::from_utf8(bytes).ok().map(quoted)
    };
    let values = if sound {
        (0..rows)
            // A string that is no UTF-8 makes the column unsound, null or not.
            .map(|i| text(i).map(|s| nulls.valid[i].then_some(s)))
            .collect()
    } else {
        None
    };
    let arrow = unchecked(data_type, rows, 0, &nulls, buffers, Vec::new());
    Ok(Ids { values, counted: nulls.counted, arrow: Arrow(arrow) })
}

/// Offsets and bytes, one offset changed if so asked. Kinds 3 and 5 have large offsets.
fn strings(values: &[&str], kind: u8, changed: Option<(usize, i64)>) -> (Vec<i64>, Vec<Buffer>) {
    let mut offsets = vec![0_i64];
    for value in values {
        offsets.push(offsets[offsets.len() - 1] + value.len() as i64);
    }
    if let Some((i, to)) = changed {
        offsets[i] = to;
    }
    let bytes = Buffer::from(values.concat().into_bytes());
    let first = if matches!(kind, 3 | 5) {
        buffer(offsets.clone())
    } else {
        buffer(offsets.iter().map(|o| *o as i32).collect::<Vec<_>>())
    };
    (offsets, vec![first, bytes])
}
