//! Arrow arrays from outside, made safe to index.
//!
//! Types are never compared by equality (child names, nullability and metadata vary between producers). What is common
//! is read in place; what is rare goes through arrow's own cast kernels.

use std::ops::Range;
use std::sync::Arc;

use arrow_array::cast::AsArray;
use arrow_array::types::Int64Type;
use arrow_array::{Array, ArrayRef, Int64Array};
use arrow_buffer::{NullBuffer, OffsetBuffer};
use arrow_cast::display::array_value_to_string;
use arrow_schema::{DataType, Field};

use crate::{Error, Result};

/// The C data interface carries no guarantee: offsets, lengths, null counts and UTF-8 are checked before use.
fn validated(name: &str, array: &ArrayRef) -> Result<()> {
    array
        .to_data()
        .validate_full()
        .map_err(|e| Error::schema(name, format!("the Arrow data is corrupt: {e}")))
}

fn cast(name: &str, array: &ArrayRef, to: &DataType) -> Result<ArrayRef> {
    arrow_cast::cast(array, to).map_err(|e| {
        Error::schema(name, format!("has type {}, which cannot be read as {to}: {e}", array.data_type()))
    })
}

/// The value at `i` as a message shows it.
pub fn show(array: &dyn Array, i: usize) -> String {
    let text = array_value_to_string(array, i).unwrap_or_else(|_| "?".to_owned());
    match array.data_type() {
        DataType::Utf8 | DataType::LargeUtf8 | DataType::Utf8View => format!("'{text}'"),
        _ => text,
    }
}

/// Runs `$body` with `$values` as the typed slice of an integer array; any other array goes to `$other`.
macro_rules! with_integers {
    ($array:expr, $values:ident => $body:expr, _ => $other:expr) => {{
        macro_rules! typed {
            ($T:ty) => {{
                let $values: &[_] = $array.as_primitive::<$T>().values();
                $body
            }};
        }
        arrow_array::downcast_integer! { $array.data_type() => (typed), _ => $other }
    }};
}
pub(crate) use with_integers;

/// Runs `$body` with `$values` as the typed slice of a float array; a boolean array's bits go to `$bool`.
macro_rules! with_floats {
    ($array:expr, $values:ident => $body:expr, $bools:ident => $bool:expr) => {{
        macro_rules! typed {
            ($T:ident) => {{
                let $values: &[_] = $array.as_primitive::<arrow_array::types::$T>().values();
                $body
            }};
        }
        match $array.data_type() {
            arrow_schema::DataType::Float16 => typed!(Float16Type),
            arrow_schema::DataType::Float32 => typed!(Float32Type),
            arrow_schema::DataType::Float64 => typed!(Float64Type),
            _ => {
                let $bools = $array.as_boolean().values();
                $bool
            }
        }
    }};
}
pub(crate) use with_floats;

/// Runs `$body` with `$values` as the typed slice of a numeric array; a boolean array's bits go to `$bool`.
macro_rules! with_numbers {
    ($array:expr, $values:ident => $body:expr, $bools:ident => $bool:expr) => {
        $crate::arrays::with_integers!(
            $array,
            $values => $body,
            _ => $crate::arrays::with_floats!($array, $values => $body, $bools => $bool)
        )
    };
}
pub(crate) use with_numbers;

/// What the elements of a list may be.
pub enum Element {
    Integer,
    /// Integers, floats or booleans that have to be 0 or 1.
    Mask,
    Number,
}

impl Element {
    fn accepts(&self, t: &DataType) -> bool {
        match self {
            Self::Integer => t.is_integer(),
            Self::Mask | Self::Number => t.is_integer() || t.is_floating() || *t == DataType::Boolean,
        }
    }

    fn wanted(&self) -> &'static str {
        match self {
            Self::Integer => "a list of integers",
            Self::Mask => "a list of 0 and 1 (integers, booleans or floats)",
            Self::Number => "a list of numbers, as long as the response",
        }
    }
}

/// A list column: where each row's values lie in one flat array.
#[derive(Debug, Clone)]
pub struct List {
    pub name: String,
    offsets: Offsets,
    nulls: Option<NullBuffer>,
    pub values: ArrayRef,
}

#[derive(Debug, Clone)]
enum Offsets {
    Small(OffsetBuffer<i32>),
    Large(OffsetBuffer<i64>),
}

impl List {
    pub fn import(name: &str, array: &ArrayRef, element: &Element) -> Result<Self> {
        if let Some((data, shape)) = tensor(array) {
            validated(name, array)?;
            return Self::ragged(name, array, data, shape, element);
        }
        let child = match array.data_type() {
            DataType::List(f)
            | DataType::LargeList(f)
            | DataType::ListView(f)
            | DataType::LargeListView(f)
            | DataType::FixedSizeList(f, _) => f.data_type().clone(),
            _ => DataType::Null,
        };
        // A list of nothing but empty lists has no element type.
        let empty = is_list(array) && child == DataType::Null;
        if !is_list(array) || !(empty || element.accepts(&child)) {
            let found = array.data_type();
            let why = match (found, element) {
                (DataType::Null, Element::Mask) => {
                    ": every value is null; pass columns={\"loss_mask\": None} to do without a mask"
                }
                (t, Element::Number) if t.is_numeric() => {
                    "; a value for each sample, not for each token, is named in sample_columns="
                }
                _ => advice(if child.is_decimal() { &child } else { found }).unwrap_or_default(),
            };
            return Err(Error::schema(
                name,
                format!("has type {found}, and it has to be {}{why}", element.wanted()),
            ));
        }
        validated(name, array)?;
        // arrow's cast gives lists of no values the wrong number of rows.
        if let Some(list) = array.as_fixed_size_list_opt() {
            let size = list.value_length() as usize;
            let values = list.values();
            return Ok(Self {
                name: name.to_owned(),
                offsets: Offsets::Large(OffsetBuffer::from_repeated_length(size, list.len())),
                nulls: list.nulls().cloned(),
                values: if empty { cast(name, values, &DataType::Int32)? } else { Arc::clone(values) },
            });
        }
        let read_in_place = matches!(array.data_type(), DataType::List(_) | DataType::LargeList(_)) && !empty;
        let array = if read_in_place {
            Arc::clone(array)
        } else {
            let child = if empty { DataType::Int32 } else { child };
            let field = Arc::new(Field::new_list_field(child, true));
            cast(name, array, &DataType::LargeList(field))?
        };
        Ok(if let Some(list) = array.as_list_opt::<i32>() {
            Self {
                name: name.to_owned(),
                offsets: Offsets::Small(list.offsets().clone()),
                nulls: list.nulls().cloned(),
                values: Arc::clone(list.values()),
            }
        } else {
            let list = array.as_list::<i64>();
            Self {
                name: name.to_owned(),
                offsets: Offsets::Large(list.offsets().clone()),
                nulls: list.nulls().cloned(),
                values: Arc::clone(list.values()),
            }
        })
    }

    /// The rows of arrays of any length, which have to have one dimension.
    fn ragged(
        name: &str,
        array: &ArrayRef,
        data: &ArrayRef,
        shape: &ArrayRef,
        element: &Element,
    ) -> Result<Self> {
        let mut list = Self::import(name, data, element)?;
        list.nulls = NullBuffer::union(list.nulls.as_ref(), array.nulls());
        let shapes = Self::import(name, shape, &Element::Integer)?;
        let dimensions = |i: &usize| shapes.range(*i).len();
        match (0..array.len()).filter(|i| !list.is_null(*i)).map(|i| dimensions(&i)).find(|n| *n != 1) {
            None => Ok(list),
            Some(n) => Err(Error::schema(
                name,
                format!("holds arrays of {n} dimensions, and a row's values have to be one flat list"),
            )),
        }
    }

    pub fn is_null(&self, i: usize) -> bool {
        self.nulls.as_ref().is_some_and(|n| n.is_null(i))
    }

    /// Where row `i`'s values lie in `values`.
    pub fn range(&self, i: usize) -> Range<usize> {
        match &self.offsets {
            Offsets::Small(o) => o[i] as usize..o[i + 1] as usize,
            Offsets::Large(o) => o[i] as usize..o[i + 1] as usize,
        }
    }

    /// As [`List::range`], where neither the row nor one of its values is null; else what is wrong.
    pub fn range_without_null(&self, i: usize) -> std::result::Result<Range<usize>, String> {
        if self.is_null(i) {
            return Err("is null; fill it or drop the row".to_owned());
        }
        let range = self.range(i);
        let nulls = self.values.nulls().filter(|n| n.null_count() > 0);
        match nulls.and_then(|nulls| range.clone().position(|j| nulls.is_null(j))) {
            Some(position) => {
                let made =
                    if self.values.data_type().is_floating() { " (pandas makes one of a NaN)" } else { "" };
                Err(format!("the value at position {position} is null{made}; fill it or drop the row"))
            }
            None => Ok(range),
        }
    }
}

/// The values and the shapes of a column of ragged arrays, as Ray Data lays it out: a struct of the two.
fn tensor(array: &ArrayRef) -> Option<(&ArrayRef, &ArrayRef)> {
    let rows = array.as_struct_opt().filter(|s| s.num_columns() == 2)?;
    let (data, shape) = (rows.column_by_name("data")?, rows.column_by_name("shape")?);
    (is_list(data) && is_list(shape)).then_some((data, shape))
}

/// What to do about types that nobody chose.
fn advice(found: &DataType) -> Option<&'static str> {
    match found {
        t if t.is_floating() => Some(
            ": pandas makes floats of integers with gaps; fill the gaps and cast the column to int64 (JSON readers make \
             them of integers beyond int64; write those as text)",
        ),
        t if t.is_decimal() => Some(
            ": DuckDB makes decimals of sums of integers; write sum(...)::BIGINT, or cast the column to int64",
        ),
        DataType::Utf8 | DataType::LargeUtf8 | DataType::Utf8View => {
            Some(": it holds text; parse it where the data is made")
        }
        _ => None,
    }
}

fn is_list(array: &ArrayRef) -> bool {
    matches!(
        array.data_type(),
        DataType::List(_)
            | DataType::LargeList(_)
            | DataType::ListView(_)
            | DataType::LargeListView(_)
            | DataType::FixedSizeList(_, _)
    )
}

/// An integer column of lengths. What does not fit an int64 stays visible in `original`.
#[derive(Debug, Clone)]
pub struct Lengths {
    pub name: String,
    values: Int64Array,
    original: ArrayRef,
}

impl Lengths {
    pub fn import(name: &str, array: &ArrayRef) -> Result<Self> {
        let found = array.data_type();
        if !found.is_integer() && *found != DataType::Null {
            let why = advice(found).unwrap_or_default();
            return Err(Error::schema(name, format!("has type {found}, and it has to be an integer{why}")));
        }
        validated(name, array)?;
        Ok(Self {
            name: name.to_owned(),
            values: cast(name, array, &DataType::Int64)?.as_primitive::<Int64Type>().clone(),
            original: Arc::clone(array),
        })
    }

    pub fn is_null(&self, i: usize) -> bool {
        self.original.is_null(i) || *self.original.data_type() == DataType::Null
    }

    /// The value, or the largest int64 where it is larger than that.
    pub fn value(&self, i: usize) -> i64 {
        if self.values.is_valid(i) { self.values.value(i) } else { i64::MAX }
    }

    pub fn show(&self, i: usize) -> String {
        show(&self.original, i)
    }
}

/// A column of ids: integers, strings or binary.
#[derive(Debug, Clone)]
pub struct Ids {
    pub name: String,
    pub values: ArrayRef,
}

impl Ids {
    pub fn import(name: &str, array: &ArrayRef, first_row: i64) -> Result<Self> {
        use DataType as D;
        let values = match array.data_type() {
            t if t.is_integer() => Arc::clone(array),
            D::Utf8 | D::LargeUtf8 | D::Binary | D::LargeBinary | D::FixedSizeBinary(_) => Arc::clone(array),
            D::Utf8View => cast(name, array, &D::LargeUtf8)?,
            D::BinaryView => cast(name, array, &D::LargeBinary)?,
            D::Dictionary(_, values) => {
                validated(name, array)?;
                return Self::import(name, &cast(name, array, values)?, first_row);
            }
            D::RunEndEncoded(_, values) => {
                validated(name, array)?;
                return Self::import(name, &cast(name, array, values.data_type())?, first_row);
            }
            D::Null if array.is_empty() => Arc::clone(array),
            D::Null => {
                return Err(Error::data(
                    name,
                    first_row,
                    "is null, as is every value of this column (it has type Null); an id cannot be made up: fill the column where \
                     the data is made, or leave it out",
                ));
            }
            found => {
                let why = match found {
                    f if f.is_floating() => ", as a float cannot tell large ids apart",
                    _ => "",
                };
                let fix = advice(found).unwrap_or("; cast it to one of these");
                return Err(Error::schema(
                    name,
                    format!("has type {found}, and ids are integers, strings or binary{why}{fix}"),
                ));
            }
        };
        validated(name, &values)?;
        Ok(Self { name: name.to_owned(), values })
    }
}

/// A number per sample that is carried along.
#[derive(Debug, Clone)]
pub struct Scalars {
    pub name: String,
    pub values: ArrayRef,
}

impl Scalars {
    pub fn import(name: &str, array: &ArrayRef) -> Result<Self> {
        let found = array.data_type();
        let null = *found == DataType::Null;
        if !(found.is_integer() || found.is_floating() || null || *found == DataType::Boolean) {
            let fix = advice(found).filter(|_| found.is_decimal());
            let fix = fix.unwrap_or("; look other things up by MicroBatch.rows");
            return Err(Error::schema(
                name,
                format!("has type {found}, and a sample column has to be a number{fix}"),
            ));
        }
        validated(name, array)?;
        let values = if null { cast(name, array, &DataType::Float32)? } else { Arc::clone(array) };
        Ok(Self { name: name.to_owned(), values })
    }

    /// Whether it travels as float32, like token columns. Integers and booleans travel as float64, which holds them.
    pub fn is_float(&self) -> bool {
        self.values.data_type().is_floating()
    }
}
