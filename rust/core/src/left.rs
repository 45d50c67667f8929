//! Samples that are not placed yet, longest first, from which any can be taken.

pub(crate) struct Left<'a> {
    /// (length, sample), longest first: also those that were taken.
    pub sorted: &'a [(i64, usize)],
    /// The next from each one on that may still be there: itself, until it is taken.
    next: Vec<usize>,
    pub count: usize,
}

impl<'a> Left<'a> {
    pub fn new(sorted: &'a [(i64, usize)]) -> Self {
        Self { sorted, next: (0..=sorted.len()).collect(), count: sorted.len() }
    }

    /// The longest of those from `place` on.
    pub fn longest(&mut self, mut place: usize) -> Option<usize> {
        while self.next[place] != place {
            self.next[place] = self.next[self.next[place]];
            place = self.next[place];
        }
        (place < self.sorted.len()).then_some(place)
    }

    /// The first place, of what is left or not, of a sample no longer than `room`.
    pub fn place_within(&self, room: i64) -> usize {
        self.sorted.partition_point(|(length, _)| *length > room)
    }

    pub fn take(&mut self, place: usize) {
        self.next[place] = place + 1;
        self.count -= 1;
    }
}
