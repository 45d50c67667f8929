//! The core of rollpack: Arrow → [`summarize`](summary::summarize) → [`plan`](plan::plan) → [`pack`](pack::pack).
//!
//! It knows nothing of Python. Each rule has one home: which column plays which role in [`columns`], types in [`arrays`],
//! checking rows in [`check`], ids in [`ids`], the arguments of a plan in [`options`], the meaning of every mode in
//! [`weights`], optimizer steps in [`steps`], the budget in [`bins`], balance over ranks in [`balance`], of parts without a
//! cap in [`partition`] and, where ranks wait at every micro-batch, in [`lockstep`], whole units on a rank in [`keep`],
//! steps that are still arriving in [`online`], cost in [`cost`], padding and context parallelism in [`cut`], the columns of
//! a plan in [`placed`], rows that are held for packing in [`rows`].
#![forbid(unsafe_code)]

pub mod arrays;
pub mod balance;
pub mod bins;
mod carry;
pub mod check;
pub mod columns;
pub mod cost;
pub mod cut;
pub mod error;
pub mod ids;
pub mod keep;
mod left;
pub mod lockstep;
pub mod online;
pub mod options;
pub mod pack;
pub mod partition;
pub mod placed;
pub mod plan;
pub mod rows;
pub mod steps;
pub mod summary;
mod swaps;
mod waits;
pub mod weights;

pub use error::{Error, Result};
