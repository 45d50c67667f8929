//! Reading columns: which one plays which role.

use std::sync::Arc;

use arrow_array::{ArrayRef, RecordBatch};
use arrow_schema::{ArrowError, Schema};

use crate::arrays::{Element, Ids, Lengths, List, Scalars};
use crate::check::Faults;
use crate::{Error, Result};

/// The parts that a column can play. `columns` maps these to the names in the data.
pub const ROLES: [&str; 5] = ["tokens", "response_length", "loss_mask", "rollout_id", "group_index"];

/// What to read from the data, and under which names.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Request {
    /// Role → name in the data; `None`: this column is to be taken as absent.
    pub columns: Vec<(String, Option<String>)>,
    /// The columns (roles or names) that tell rollouts apart together; none: each row is a rollout.
    pub rollout_key: Vec<String>,
    /// Whether `group_index` is read.
    pub groups: bool,
    /// Columns to carry along: a number per response token.
    pub token_columns: Vec<String>,
    /// Columns to carry along: a number per sample.
    pub sample_columns: Vec<String>,
}

/// How the caller named a column.
enum Named<'a> {
    /// By `columns`, or as part of a key: it has to be there.
    Stated(&'a str),
    /// Not at all: the role's own name is looked for.
    Default(&'a str),
    /// `columns={role: None}`.
    Absent,
}

impl Request {
    /// Refuses roles that do not exist, before any data is read.
    pub fn validate(&self) -> Result<()> {
        for (role, _) in &self.columns {
            if !ROLES.contains(&role.as_str()) {
                return Err(Error::schema(
                    role,
                    format!("columns= maps roles to names, and the roles are {}", ROLES.join(", ")),
                ));
            }
        }
        for (i, part) in self.rollout_key.iter().enumerate() {
            if self.rollout_key[..i].contains(part) {
                return Err(Error::schema(part, "is named twice in rollout_key"));
            }
        }
        Ok(())
    }

    fn named<'a>(&'a self, role: &'a str) -> Named<'a> {
        match self.columns.iter().find(|(r, _)| r == role) {
            Some((_, Some(name))) => Named::Stated(name),
            Some((_, None)) => Named::Absent,
            None => Named::Default(role),
        }
    }

    /// The name in the data of the column that plays `role`.
    pub fn name<'a>(&'a self, role: &'a str) -> &'a str {
        match self.named(role) {
            Named::Stated(name) | Named::Default(name) => name,
            Named::Absent => role,
        }
    }
}

/// The columns of one record batch that are read, typed and validated.
#[derive(Debug, Clone)]
pub struct Samples {
    /// The number, in the whole input, of this batch's row 0.
    pub first_row: i64,
    pub num_rows: usize,
    pub tokens: List,
    pub response_length: Option<Lengths>,
    pub loss_mask: Option<List>,
    /// The rollout key, a column each part; none: each row is a rollout.
    pub key: Vec<Ids>,
    pub group: Option<Ids>,
    pub token_columns: Vec<List>,
    pub sample_columns: Vec<Scalars>,
}

impl Samples {
    /// Types and validates the columns that `request` names. Each bad column is a fault, and is then left out;
    /// without tokens, or without both mask and response length, there is nothing to go on with.
    pub fn import(
        batch: &RecordBatch,
        request: &Request,
        first_row: i64,
        faults: &mut Faults,
    ) -> Option<Self> {
        let schema = batch.schema();
        // An empty slice may begin anywhere in its offsets, which arrow-rs takes for corrupt.
        let empty = (batch.num_rows() == 0).then(|| RecordBatch::new_empty(Arc::clone(&schema)));
        let reader = Reader { batch: empty.as_ref().unwrap_or(batch), schema: &schema, request };
        let tokens =
            faults.keep(reader.role("tokens", true).and_then(|c| {
                c.map(|(name, array)| List::import(name, array, &Element::Integer)).transpose()
            }));
        let response_length = faults.keep(
            reader
                .role("response_length", false)
                .and_then(|c| c.map(|(name, array)| Lengths::import(name, array)).transpose()),
        );
        let loss_mask = faults.keep(
            reader
                .role("loss_mask", false)
                .and_then(|c| c.map(|(name, array)| List::import(name, array, &Element::Mask)).transpose()),
        );
        if matches!((&response_length, &loss_mask), (Some(None), Some(None))) {
            faults.push(Error::schema(
                request.name("loss_mask"),
                format!(
                    "neither this column nor '{}' is there, and one of them is needed to tell the response from the \
                     prompt; {}",
                    request.name("response_length"),
                    reader.others("loss_mask")
                ),
            ));
        }
        let mut key = Vec::new();
        for part in &request.rollout_key {
            let optional = request.rollout_key.len() == 1 && part == "rollout_id";
            let ids = reader
                .role(part, !optional)
                .and_then(|c| c.map(|(name, array)| Ids::import(name, array, first_row)).transpose());
            key.extend(faults.keep(ids).flatten());
        }
        let group = if request.groups {
            faults
                .keep(
                    reader
                        .role("group_index", true)
                        .and_then(|c| c.map(|(name, array)| Ids::import(name, array, first_row)).transpose()),
                )
                .flatten()
        } else {
            None
        };
        let mut token_columns = Vec::new();
        for name in &request.token_columns {
            let list = reader.column(name).and_then(|a| List::import(name, a, &Element::Number));
            token_columns.extend(faults.keep(list));
        }
        let mut sample_columns = Vec::new();
        for name in &request.sample_columns {
            let scalars = reader.column(name).and_then(|a| Scalars::import(name, a));
            sample_columns.extend(faults.keep(scalars));
        }
        let (response_length, loss_mask) = (response_length.flatten(), loss_mask.flatten());
        if response_length.is_none() && loss_mask.is_none() {
            return None;
        }
        Some(Self {
            first_row,
            num_rows: batch.num_rows(),
            tokens: tokens.flatten()?,
            response_length,
            loss_mask,
            key,
            group,
            token_columns,
            sample_columns,
        })
    }
}

impl Samples {
    /// Reads one batch, of which rows are then taken.
    pub fn read(
        batch: std::result::Result<RecordBatch, ArrowError>,
        request: &Request,
        first_row: i64,
    ) -> Result<Self> {
        request.validate()?;
        let mut faults = Faults::new(1);
        let batch = batch.map_err(|e| Error::reading(&e))?;
        let samples = Self::import(&batch, request, first_row, &mut faults);
        match (samples, faults.found.pop()) {
            (Some(samples), None) => Ok(samples),
            (_, Some(fault)) => Err(fault),
            (None, None) => Err(Error::Input("no columns to read".to_owned())),
        }
    }

    /// The names of the columns that are read, which have to be the same in every part of the data.
    pub fn names(&self) -> Vec<String> {
        let lists = [Some(&self.tokens), self.loss_mask.as_ref()].into_iter().flatten();
        let lengths = self.response_length.iter().map(|c| c.name.clone());
        let ids = self.key.iter().chain(&self.group).map(|c| c.name.clone());
        lists.map(|c| c.name.clone()).chain(lengths).chain(ids).collect()
    }
}

/// Finds columns in one batch.
struct Reader<'a> {
    batch: &'a RecordBatch,
    schema: &'a Schema,
    request: &'a Request,
}

impl<'a> Reader<'a> {
    fn role(&self, role: &'a str, required: bool) -> Result<Option<(&'a str, &'a ArrayRef)>> {
        let (name, required) = match self.request.named(role) {
            Named::Absent if required => {
                return Err(Error::schema(role, "is needed here, and columns= says that it is absent"));
            }
            Named::Absent => return Ok(None),
            Named::Stated(name) => (name, true),
            Named::Default(name) => (name, required),
        };
        match self.index(name)? {
            Some(i) => Ok(Some((name, self.batch.column(i)))),
            None if required => Err(Error::schema(name, format!("is missing; {}", self.others(role)))),
            None => match self.twin(name) {
                // Taking a mask under another spelling as no mask would train on everything, without a word.
                Some(twin) => Err(Error::schema(
                    name,
                    format!(
                        "is missing, but there is '{twin}'; pass columns={{\"{role}\": \"{twin}\"}} to read that, or \
                         columns={{\"{role}\": None}} to do without"
                    ),
                )),
                None => Ok(None),
            },
        }
    }

    fn column(&self, name: &str) -> Result<&'a ArrayRef> {
        match self.index(name)? {
            Some(i) => Ok(self.batch.column(i)),
            None => Err(Error::schema(name, format!("is missing; the columns are {}", self.names()))),
        }
    }

    fn index(&self, name: &str) -> Result<Option<usize>> {
        let mut places = (0..self.schema.fields().len()).filter(|&i| self.schema.field(i).name() == name);
        let first = places.next();
        match places.next() {
            None => Ok(first),
            Some(_) => Err(Error::schema(name, "there are two columns of this name; rename one")),
        }
    }

    /// A column whose name differs only in case, in separators, by a plural or by one slip of the finger.
    fn twin(&self, name: &str) -> Option<&'a str> {
        fn plain(name: &str) -> String {
            let letters = name.chars().filter(|c| c.is_alphanumeric());
            letters.flat_map(char::to_lowercase).collect::<String>().trim_end_matches('s').to_owned()
        }
        let wanted = plain(name);
        let taken = |other: &str| ROLES.iter().any(|r| self.request.name(r) == other);
        let mut names = self.schema.fields().iter().map(|f| f.name().as_str());
        names.find(|other| !taken(other) && strsim::damerau_levenshtein(&plain(other), &wanted) <= 1)
    }

    /// What a caller may have meant by `role`, and how to say so.
    fn others(&self, role: &str) -> String {
        let name = self.request.name(role);
        let names = self.schema.fields().iter().map(|f| f.name().as_str());
        let near = names
            .map(|other| (strsim::normalized_damerau_levenshtein(name, other), other))
            .filter(|(score, other)| *score >= 0.6 && *other != name)
            .max_by(|a, b| a.0.total_cmp(&b.0));
        let (hint, the, if_it) = match near {
            Some((_, other)) => (format!("did you mean '{other}'? "), "The", "If it"),
            None => (String::new(), "the", "if it"),
        };
        let example = near.map_or("its name", |(_, other)| other);
        if !ROLES.contains(&role) {
            return format!("{hint}{the} columns are {}", self.names()); // it was named by its own name
        }
        format!(
            "{hint}{if_it} has another name, pass columns={{\"{role}\": \"{example}\"}}; the columns are {}",
            self.names()
        )
    }

    fn names(&self) -> String {
        let names: Vec<_> = self.schema.fields().iter().map(|f| format!("'{}'", f.name())).collect();
        if names.is_empty() { "none".to_owned() } else { names.join(", ") }
    }
}
