//! What can go wrong: one type, which names the column, the row and the value, and says what to do.

/// An error that a caller can act on.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum Error {
    /// A column is missing or has a type that cannot be read.
    #[error("column '{column}': {message}")]
    Schema { column: String, message: String },
    /// A value is wrong. `row` counts from 0 over the whole input, across batches.
    #[error("column '{column}', row {row}: {message}")]
    Data { column: String, row: i64, message: String },
    /// Input without a place: no rows at all, or a reader that failed.
    #[error("{0}")]
    Input(String),
    /// What was asked for cannot be met; the text says what would meet it.
    #[error("{0}")]
    Plan(String),
}

pub type Result<T> = std::result::Result<T, Error>;

impl Error {
    pub fn schema(column: &str, message: impl Into<String>) -> Self {
        Self::Schema { column: column.to_owned(), message: message.into() }
    }

    /// A reader failed.
    pub fn reading(error: &arrow_schema::ArrowError) -> Self {
        Self::Input(format!("reading the data failed: {error}"))
    }

    pub fn data(column: &str, row: i64, message: impl Into<String>) -> Self {
        Self::Data { column: column.to_owned(), row, message: message.into() }
    }
}

/// A number of things, as a message puts it: `1 row`, `2 rows`, `2 micro-batches`.
pub(crate) fn counted(number: impl std::fmt::Display, noun: &str) -> String {
    let number = number.to_string();
    let plural = match noun {
        _ if number == "1" => "",
        _ if noun.ends_with("ch") => "es",
        _ => "s",
    };
    format!("{number} {noun}{plural}")
}

/// `Err(Error::Plan(format!(...)))`.
macro_rules! plan_error {
    ($($text:tt)*) => { Err($crate::Error::Plan(format!($($text)*))) };
}
pub(crate) use plan_error;
