//! How the core is run: without the GIL, and with its errors and panics as Python's.

use std::panic::{AssertUnwindSafe, catch_unwind};

use pyo3::exceptions::PyRuntimeError;
use pyo3::prelude::*;
use rollpack_core::{Error, Result};

/// What a core error is in Python.
pub(crate) fn raise(py: Python<'_>, error: &Error) -> PyErr {
    let (class, column, row) = match error {
        Error::Schema { column, .. } => ("SchemaError", Some(column), None),
        Error::Data { column, row, .. } => ("DataError", Some(column), Some(*row)),
        Error::Input(_) => ("DataError", None, None),
        Error::Plan(_) => ("PlanError", None, None),
    };
    let make = || -> PyResult<PyErr> {
        let class = py.import("rollpack._errors")?.getattr(class)?;
        let exception = match error {
            Error::Plan(_) => class.call1((error.to_string(),))?,
            _ => class.call1((error.to_string(), column, row))?,
        };
        Ok(PyErr::from_value(exception))
    };
    make().unwrap_or_else(|e| e)
}

/// A panic is a defect of rollpack; it surfaces as an ordinary exception.
fn guarded<T>(work: impl FnOnce() -> T) -> PyResult<T> {
    catch_unwind(AssertUnwindSafe(work)).map_err(|panic| {
        let text = panic.downcast_ref::<String>().cloned();
        let text = text.or_else(|| panic.downcast_ref::<&str>().map(|s| (*s).to_owned()));
        PyRuntimeError::new_err(format!(
            "a defect in rollpack, please report it: {}",
            text.unwrap_or_default()
        ))
    })
}

/// Runs the core without the GIL.
pub(crate) fn released<T: Send>(py: Python<'_>, work: impl FnOnce() -> Result<T> + Send) -> PyResult<T> {
    let result = py.detach(|| guarded(work))?;
    py.check_signals()?; // Ctrl-C that came meanwhile
    result.map_err(|e| raise(py, &e))
}
