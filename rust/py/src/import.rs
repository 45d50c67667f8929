//! Arrow streams from Python, looked at before arrow-rs makes arrays of them.
//!
//! The C data interface promises nothing, and arrow-rs takes its word: it slices children by the lengths that it is told,
//! reads buffer sizes off offsets, and drops a bitmap of nulls whose count is said to be 0. What it relies on is checked
//! here, batch by batch; what it can check afterwards (offsets, nulls, UTF-8), the core has it check.

use std::ffi::{CStr, c_char};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;

use arrow_array::ffi::{FFI_ArrowArray, FFI_ArrowSchema, from_ffi_and_data_type};
use arrow_array::ffi_stream::FFI_ArrowArrayStream;
use arrow_array::{Array, RecordBatch, RecordBatchOptions, StructArray};
use arrow_data::layout;
use arrow_schema::{ArrowError, DataType, Schema, SchemaRef};
use pyo3::prelude::*;
use pyo3::types::PyCapsule;

/// A stream that was taken from Python. It is opened, drained and freed wherever it is iterated: without the GIL.
pub struct Stream {
    producer: FFI_ArrowArrayStream,
    schema: Option<SchemaRef>,
    done: bool,
}

impl<'py> FromPyObject<'_, 'py> for Stream {
    type Error = PyErr;

    fn extract(data: Borrowed<'_, 'py, PyAny>) -> PyResult<Self> {
        let capsule = data.call_method0("__arrow_c_stream__")?.cast_into::<PyCapsule>()?;
        let pointer = capsule.pointer_checked(Some(c"arrow_array_stream"))?.cast::<FFI_ArrowArrayStream>();
        // SAFETY: a capsule of this name points to such a struct, which this moves out of it.
        let producer = unsafe { FFI_ArrowArrayStream::from_raw(pointer.as_ptr()) };
        Ok(Self { producer, schema: None, done: false })
    }
}

impl Iterator for Stream {
    type Item = Result<RecordBatch, ArrowError>;

    fn next(&mut self) -> Option<Self::Item> {
        if self.done {
            return None;
        }
        // What panics here is arrow-rs, at a layout that it did not expect.
        let next = catch_unwind(AssertUnwindSafe(|| self.batch()))
            .unwrap_or_else(|_| Err(corrupt("its layout is not that of its types")));
        self.done = !matches!(next, Ok(Some(_)));
        next.transpose()
    }
}

impl Stream {
    fn batch(&mut self) -> Result<Option<RecordBatch>, ArrowError> {
        let schema = self.schema()?;
        let mut array = FFI_ArrowArray::empty();
        let get_next = self.producer.get_next.ok_or_else(|| corrupt("the stream was released"))?;
        // SAFETY: the callback of a live stream, on this stream and a struct to fill.
        let code = unsafe { get_next(&raw mut self.producer, &raw mut array) };
        if code != 0 {
            return Err(self.failure(code));
        }
        if array.is_released() {
            return Ok(None);
        }
        let data_type = DataType::Struct(schema.fields().clone());
        check(&mut array, &data_type).map_err(|why| corrupt(&why))?;
        // SAFETY: the array was checked against its type as far as that can be done without the sizes of its buffers,
        // which the interface does not tell.
        let data = unsafe { from_ffi_and_data_type(array, data_type) }?;
        let rows = StructArray::from(data);
        if let Some(row) = rows.nulls().and_then(|nulls| nulls.iter().position(|valid| !valid)) {
            return Err(corrupt(&format!("row {row} of a batch is null as a whole")));
        }
        let options = RecordBatchOptions::new().with_row_count(Some(rows.len()));
        RecordBatch::try_new_with_options(schema, rows.into_parts().1, &options).map(Some)
    }

    fn schema(&mut self) -> Result<SchemaRef, ArrowError> {
        if let Some(schema) = &self.schema {
            return Ok(Arc::clone(schema));
        }
        let mut schema = FFI_ArrowSchema::empty();
        let get_schema = self.producer.get_schema.ok_or_else(|| corrupt("the stream was released"))?;
        // SAFETY: the callback of a live stream, on this stream and a struct to fill.
        let code = unsafe { get_schema(&raw mut self.producer, &raw mut schema) };
        if code != 0 {
            return Err(self.failure(code));
        }
        if !has_utf8_names(&schema) {
            return Err(corrupt("the name of a column is no UTF-8"));
        }
        let schema = Arc::new(Schema::try_from(&schema)?);
        self.schema = Some(Arc::clone(&schema));
        Ok(schema)
    }

    /// What the producer says of its failure.
    fn failure(&mut self, code: i32) -> ArrowError {
        let text = self.producer.get_last_error.and_then(|get_last_error| {
            // SAFETY: the callback of a live stream; its text is valid until the next call.
            let text = unsafe { get_last_error(&raw mut self.producer) };
            // SAFETY: as above, and it is not null.
            (!text.is_null()).then(|| unsafe { CStr::from_ptr(text) }.to_string_lossy().into_owned())
        });
        ArrowError::CDataInterface(text.unwrap_or_else(|| format!("the producer failed with code {code}")))
    }
}

/// arrow-rs panics at a name that is not.
fn has_utf8_names(schema: &FFI_ArrowSchema) -> bool {
    // SAFETY: the struct is laid out as in C, where the name is the second pointer.
    let name = unsafe { std::ptr::from_ref(schema).cast::<*const c_char>().add(1).read() };
    // SAFETY: it is null, or a string of C.
    let sound = name.is_null() || unsafe { CStr::from_ptr(name) }.to_str().is_ok();
    sound && schema.children().chain(schema.dictionary()).all(has_utf8_names)
}

fn corrupt(why: &str) -> ArrowError {
    ArrowError::CDataInterface(format!("the Arrow data is corrupt: {why}"))
}

/// Checks what arrow-rs relies on when it makes an array of this type, and has the nulls counted instead of taking the
/// producer's number.
fn check(array: &mut FFI_ArrowArray, data_type: &DataType) -> Result<(), String> {
    let end = array.length.checked_add(array.offset).filter(|_| array.length >= 0 && array.offset >= 0);
    let fits = |n: i64| n.checked_mul(width(data_type)?).filter(|bits| *bits < i64::MAX / 2);
    let Some(end) = end.filter(|n| n.checked_add(1).and_then(fits).is_some()) else {
        return Err(format!("a {data_type} has length {} and offset {}", array.length, array.offset));
    };
    array.null_count = -1;
    // polars gives an array of type Null a buffer, of which there is nothing to read.
    if *data_type == DataType::Null && array.n_buffers == 1 {
        array.n_buffers = 0;
    }
    check_buffers(array, data_type, end)?;

    let children = children(data_type);
    if usize::try_from(array.n_children).ok() != Some(children.len())
        || (array.children.is_null() && !children.is_empty())
    {
        return Err(format!("a {data_type} has {} children", array.n_children));
    }
    for (i, child_type) in children.into_iter().enumerate() {
        // SAFETY: there are as many children as were just counted, each a struct of its own.
        let child = unsafe { array.children.add(i).read_unaligned().as_mut() };
        let child = child.ok_or_else(|| format!("a child of a {data_type} is missing"))?;
        let named = |why: String| match data_type {
            DataType::Struct(fields) => format!("column '{}': {why}", fields[i].name()),
            _ => why,
        };
        check(child, child_type).map_err(named)?;
        let needed = match data_type {
            DataType::Struct(_) => Some(end),
            DataType::FixedSizeList(_, size) => end.checked_mul(i64::from(*size)).filter(|n| *n >= 0),
            _ => Some(0), // offsets rule, and are checked with the values
        };
        if needed.is_none_or(|n| child.length < n) {
            return Err(named(format!("a {data_type} of {end} rows has a child of {}", child.length)));
        }
    }

    // SAFETY: null, or a struct of its own.
    match (unsafe { array.dictionary.as_mut() }, data_type) {
        (Some(values), DataType::Dictionary(_, value_type)) => check(values, value_type),
        (None, DataType::Dictionary(_, _)) => Err("a dictionary is missing".to_owned()),
        (Some(_), _) => Err(format!("a {data_type} has a dictionary")),
        (None, _) => Ok(()),
    }
}

/// Bits a row takes in a buffer, at most, of types whose width the type tells.
fn width(data_type: &DataType) -> Option<i64> {
    match data_type {
        DataType::FixedSizeBinary(bytes) => {
            i64::from(*bytes).checked_mul(8).filter(|n| *n >= 0).map(|n| n.max(1))
        }
        _ => Some(256),
    }
}

fn children(data_type: &DataType) -> Vec<&DataType> {
    match data_type {
        DataType::List(field)
        | DataType::LargeList(field)
        | DataType::ListView(field)
        | DataType::LargeListView(field)
        | DataType::FixedSizeList(field, _)
        | DataType::Map(field, _) => vec![field.data_type()],
        DataType::Struct(fields) => fields.iter().map(|f| f.data_type()).collect(),
        DataType::Union(fields, _) => fields.iter().map(|(_, f)| f.data_type()).collect(),
        DataType::RunEndEncoded(ends, values) => vec![ends.data_type(), values.data_type()],
        _ => Vec::new(),
    }
}

/// `end`: offset and length together.
#[allow(clippy::cast_ptr_alignment)] // it is looked at
fn check_buffers(array: &FFI_ArrowArray, data_type: &DataType, end: i64) -> Result<(), String> {
    let layout = layout(data_type);
    let wanted = layout.buffers.len() + usize::from(layout.can_contain_null_mask);
    let found = usize::try_from(array.n_buffers).unwrap_or(0);
    let right = if layout.variadic { found > wanted } else { found == wanted };
    if !right || (array.buffers.is_null() && found > 0) {
        return Err(format!("a {data_type} has {} buffers", array.n_buffers));
    }
    if layout.variadic && found > wanted + 1 {
        let lengths = array.buffer(found - 1).cast::<i64>();
        let sound = |i| {
            // SAFETY: the last buffer holds a length for each of the buffers between it and the views.
            unsafe { lengths.add(i).read_unaligned() >= 0 }
        };
        if lengths.is_null() || !lengths.is_aligned() || !(0..found - wanted - 1).all(sound) {
            return Err(format!("the buffer lengths of a {data_type} are wrong"));
        }
    }
    let last = match data_type {
        DataType::Utf8 | DataType::Binary => last_offset::<i32>(array, end),
        DataType::LargeUtf8 | DataType::LargeBinary => last_offset::<i64>(array, end),
        _ => Ok(0),
    };
    // arrow-rs takes the last offset for the size of the buffer.
    match last {
        Ok(offset) if offset >= 0 => Ok(()),
        Ok(offset) => Err(format!("the last offset of a {data_type} is {offset}")),
        Err(why) => Err(format!("the offsets of a {data_type} are {why}")),
    }
}

/// The last offset of strings or binary; 0 where there are no rows, and then perhaps no offsets.
#[allow(clippy::cast_ptr_alignment)] // it is looked at
fn last_offset<O: Copy + Into<i64>>(array: &FFI_ArrowArray, end: i64) -> Result<i64, &'static str> {
    if array.length == 0 {
        return Ok(0);
    }
    let offsets = array.buffer(1).cast::<O>();
    if offsets.is_null() {
        return Err("missing");
    }
    if !offsets.is_aligned() {
        return Err("not aligned");
    }
    // SAFETY: there is one offset more than there are rows.
    Ok(unsafe { offsets.add(end as usize).read() }.into())
}
