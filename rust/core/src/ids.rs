//! Ids of any type become dense numbers in first-seen order. No id is invented, none is merged.

use arrow_array::cast::AsArray;
use arrow_array::{Array, ArrayRef, downcast_integer, make_array};
use arrow_data::transform::MutableArrayData;
use arrow_schema::DataType;
use rustc_hash::FxHashMap;

use crate::arrays::{Ids, show};
use crate::{Error, Result};

/// Stands where an id is null; such rows are refused before anybody counts them.
pub const NO_ID: usize = usize::MAX;

/// Numbers the ids of one column, over any number of batches.
#[derive(Debug, Default)]
pub struct Interner {
    integers: FxHashMap<u64, usize>,
    bytes: FxHashMap<Box<[u8]>, usize>,
    kind: Option<DataType>,
}

impl Interner {
    /// The number of every row's id.
    #[allow(clippy::cast_lossless)] // in a macro over all integer types
    pub fn intern(&mut self, ids: &Ids) -> Result<Vec<usize>> {
        self.same_type(ids)?;
        if ids.values.is_empty() {
            return Ok(Vec::new());
        }
        let found = ids.values.data_type();
        let values = &ids.values;
        macro_rules! integers {
            ($T:ty) => {{
                self.integers.reserve(values.len());
                let mut last = (None, NO_ID);
                let number = |id: Option<u64>| {
                    // Samples of a rollout or a group are often neighbours.
                    if id != last.0 {
                        last = (id, self.integer(id));
                    }
                    last.1
                };
                // Sign extension keeps different values of one type different.
                values.as_primitive::<$T>().iter().map(|v| v.map(|v| v as u64)).map(number).collect()
            }};
        }
        macro_rules! bytes {
            ($array:expr) => {
                $array.iter().map(|v| self.binary(v.map(|v| v.as_ref()))).collect()
            };
        }
        Ok(downcast_integer! {
            found => (integers),
            DataType::Utf8 => bytes!(values.as_string::<i32>()),
            DataType::LargeUtf8 => bytes!(values.as_string::<i64>()),
            DataType::Binary => bytes!(values.as_binary::<i32>()),
            DataType::LargeBinary => bytes!(values.as_binary::<i64>()),
            DataType::FixedSizeBinary(_) => bytes!(values.as_fixed_size_binary()),
            other => return Err(Error::schema(&ids.name, format!("has type {other}, which is no id"))),
        })
    }

    /// Refuses ids of another type than before: 1 and "1" may or may not be the same.
    fn same_type(&mut self, ids: &Ids) -> Result<()> {
        let found = ids.values.data_type();
        match &self.kind {
            _ if ids.values.is_empty() => {}
            Some(kind) if kind != found => {
                return Err(Error::schema(
                    &ids.name,
                    format!(
                        "has type {found} here and {kind} before; cast all parts of the data to one type"
                    ),
                ));
            }
            _ => self.kind = Some(found.clone()),
        }
        Ok(())
    }

    fn integer(&mut self, value: Option<u64>) -> usize {
        let next = self.integers.len();
        value.map_or(NO_ID, |v| *self.integers.entry(v).or_insert(next))
    }

    fn binary(&mut self, value: Option<&[u8]>) -> usize {
        let Some(value) = value else { return NO_ID };
        if let Some(known) = self.bytes.get(value) {
            return *known;
        }
        let next = self.bytes.len();
        self.bytes.insert(value.into(), next);
        next
    }
}

/// Numbers the ids of a key, a column each part, over any number of batches.
#[derive(Debug, Default)]
struct KeyInterner {
    parts: Vec<Interner>,
    /// Pairs (number of the key so far, number of the next part) → number of the longer key.
    pairs: Vec<FxHashMap<(usize, usize), usize>>,
}

impl KeyInterner {
    /// The number of every row's key; none where the key has no part.
    fn intern(&mut self, key: &[Ids]) -> Result<Option<Vec<usize>>> {
        self.parts.resize_with(key.len(), Interner::default);
        self.pairs.resize_with(key.len().saturating_sub(1), FxHashMap::default);
        let mut columns = key.iter().zip(&mut self.parts).map(|(ids, part)| part.intern(ids));
        let Some(first) = columns.next() else { return Ok(None) };
        let mut numbers = first?;
        for (column, pairs) in columns.zip(&mut self.pairs) {
            for (number, part) in numbers.iter_mut().zip(column?) {
                let next = pairs.len();
                if *number == NO_ID || part == NO_ID {
                    *number = NO_ID;
                } else {
                    *number = *pairs.entry((*number, part)).or_insert(next);
                }
            }
        }
        Ok(Some(numbers))
    }

    /// Only sees to it that the key keeps its types.
    fn same_types(&mut self, key: &[Ids]) -> Result<()> {
        self.parts.resize_with(key.len(), Interner::default);
        key.iter().zip(&mut self.parts).try_for_each(|(ids, part)| part.same_type(ids))
    }
}

/// Tells rollouts and prompt groups apart, row after row, and sees to it that no rollout lies in two groups.
#[derive(Debug, Default)]
pub struct Grouping {
    rollouts: KeyInterner,
    groups: KeyInterner,
    /// The group of each rollout and the row that said so.
    group_of: Vec<(usize, i64)>,
    rows: usize,
}

/// The rollout of each row of a batch and, where groups are read, its group.
#[derive(Debug, Default)]
pub struct Numbered {
    pub rollouts: Vec<usize>,
    pub groups: Option<Vec<usize>>,
}

impl Grouping {
    /// Numbers `num_rows` further rows. Without a key each row is a rollout.
    pub fn number(&mut self, key: &[Ids], group: &[Ids], num_rows: usize) -> Result<Numbered> {
        let rows = self.rows..self.rows + num_rows;
        self.rows += num_rows;
        Ok(Numbered {
            rollouts: self.rollouts.intern(key)?.unwrap_or_else(|| rows.collect()),
            groups: self.groups.intern(group)?,
        })
    }

    /// Where nobody asks which rollout lies in which group: only sees to it that the key keeps its types.
    pub fn same_types(&mut self, key: &[Ids]) -> Result<()> {
        self.rollouts.same_types(key)
    }

    /// Refuses a rollout that has samples in two groups. `row` is row `i` of the batch that holds the ids; `at` says where
    /// another row is.
    pub fn one_group(
        &mut self,
        numbered: &Numbered,
        i: usize,
        row: i64,
        key: &[Ids],
        group: &[Ids],
        at: impl Fn(i64) -> String,
    ) -> Result<()> {
        let (Some(groups), Some(ids)) = (&numbered.groups, group.last()) else {
            return Ok(());
        };
        let (rollout, here) = (numbered.rollouts[i], groups[i]);
        if rollout == NO_ID || here == NO_ID {
            return Ok(());
        }
        if self.group_of.len() <= rollout {
            self.group_of.resize(rollout + 1, (NO_ID, 0));
        }
        let (known, first) = self.group_of[rollout];
        if known == NO_ID {
            self.group_of[rollout] = (here, row);
            return Ok(());
        }
        if known == here {
            return Ok(());
        }
        let names: Vec<_> = key.iter().map(|k| format!("{} {}", k.name, show(&k.values, i))).collect();
        Err(Error::data(
            &ids.name,
            row,
            format!(
                "the rollout of {} is in group {} here and in another group at {}. If rollout ids are unique only \
                 within their prompt, pass rollout_key=(\"group_index\", \"rollout_id\")",
                names.join(", "),
                show(&ids.values, i),
                at(first)
            ),
        ))
    }
}

/// Joins the ids of many batches into one array of their own, so that no batch is kept alive by its ids.
#[derive(Debug, Default)]
pub struct IdColumn {
    parts: Vec<ArrayRef>,
}

impl IdColumn {
    /// Adds the ids of the rows that `keep` marks.
    pub fn push(&mut self, ids: &Ids, keep: &[bool]) -> Result<()> {
        let data = ids.values.to_data();
        let mut copy = MutableArrayData::new(vec![&data], false, keep.len());
        let mut start = 0;
        for run in keep.chunk_by(|a, b| a == b) {
            if run.first() == Some(&true) {
                copy.try_extend(0, start, start + run.len())
                    .map_err(|e| Error::schema(&ids.name, e.to_string()))?;
            }
            start += run.len();
        }
        self.parts.push(make_array(copy.freeze()));
        Ok(())
    }

    pub fn finish(self, name: String) -> Result<Ids> {
        let parts: Vec<&dyn Array> = self.parts.iter().filter(|p| !p.is_empty()).map(AsRef::as_ref).collect();
        match arrow_select::concat::concat(&parts) {
            Ok(values) => Ok(Ids { name, values }),
            Err(e) => Err(Error::schema(&name, format!("the ids cannot be joined: {e}"))),
        }
    }
}
