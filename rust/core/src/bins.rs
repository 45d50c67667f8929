//! Packing by budget: as few micro-batches as a hard cap on their tokens allows.

use std::cmp::Reverse;
use std::collections::BTreeMap;

use crate::left::Left;

/// Best fit decreasing: each sample, longest first, goes where it leaves the least room. Every length is at most
/// `capacity`. Ties go to the earlier sample and, among equally full bins, to the one filled last, so the same input
/// gives the same bins. O(n + capacity), and O(n log n) where the capacity is so large that a table of it would not pay.
pub fn best_fit_decreasing(lengths: &[i64], capacity: i64) -> Vec<Vec<usize>> {
    /// The largest table of rooms: 32 MiB, of which only what is used is ever touched.
    const MAX_TABLE: usize = 1 << 22;
    // What holds everything is as good as what holds more.
    let all = lengths.iter().fold(0i64, |sum, length| sum.saturating_add(*length));
    let capacity = usize::try_from(capacity.min(all)).unwrap_or(0);
    if capacity < MAX_TABLE && u32::try_from(lengths.len()).is_ok() {
        best_fit(lengths, capacity, Table::new(capacity))
    } else {
        best_fit(lengths, capacity, BTreeMap::new())
    }
}

fn best_fit(lengths: &[i64], capacity: usize, mut rooms: impl Rooms) -> Vec<Vec<usize>> {
    let sorted = sorted(lengths);
    let mut sizes: Vec<usize> = Vec::new();
    let mut bin_of = Vec::with_capacity(sorted.len());
    for (length, _) in &sorted {
        let length = *length as usize;
        let (room, bin) = rooms.take(length).unwrap_or_else(|| {
            sizes.push(0);
            (capacity, sizes.len() - 1)
        });
        sizes[bin] += 1;
        bin_of.push(bin);
        rooms.put(room - length, bin);
    }
    filled(&sizes, sorted.into_iter().map(|(_, sample)| sample), bin_of)
}

/// The samples of each bin in the order given. In a pass of its own, so that each bin is allocated once.
pub(crate) fn filled(
    sizes: &[usize],
    samples: impl Iterator<Item = usize>,
    bin_of: Vec<usize>,
) -> Vec<Vec<usize>> {
    let mut bins: Vec<Vec<usize>> = sizes.iter().map(|size| Vec::with_capacity(*size)).collect();
    for (sample, bin) in samples.zip(bin_of) {
        bins[bin].push(sample);
    }
    bins
}

/// Open bins by the room that is left in them.
trait Rooms {
    /// Takes out the bin with the least room that is at least `least`, of several the one put in last.
    fn take(&mut self, least: usize) -> Option<(usize, usize)>;
    fn put(&mut self, room: usize, bin: usize);
}

impl Rooms for BTreeMap<usize, Vec<usize>> {
    fn take(&mut self, least: usize) -> Option<(usize, usize)> {
        let (&room, bins) = self.range_mut(least..).next()?;
        let bin = bins.pop()?;
        if bins.is_empty() {
            self.remove(&room);
        }
        Some((room, bin))
    }

    fn put(&mut self, room: usize, bin: usize) {
        self.entry(room).or_default().push(bin);
    }
}

/// A stack of bins for each room, and a bit for each stack that is not empty. Words of bits have bits of their own, level
/// upon level, so that the next stack is found in a few steps: three levels are enough for a room of 262,144 tokens.
struct Table {
    /// The top of the stack of each room. It says nothing where the room has no bit. In 32 bits, as more of it is in the cache.
    top: Vec<u32>,
    /// What lies under each bin in its stack.
    under: Vec<u32>,
    levels: Vec<Vec<u64>>,
}

/// The bottom of a stack.
const BOTTOM: u32 = u32::MAX;

impl Table {
    fn new(capacity: usize) -> Self {
        let mut levels = vec![vec![0; capacity / 64 + 1]];
        while let Some(words) = levels.last().map(Vec::len).filter(|words| *words > 1) {
            levels.push(vec![0; words.div_ceil(64)]);
        }
        Self { top: vec![0; capacity + 1], under: Vec::new(), levels }
    }

    /// The first bit at or after `place`: up until a word has one, and down again along first bits.
    fn next(&self, mut place: usize) -> Option<usize> {
        for (level, words) in self.levels.iter().enumerate() {
            let word = words.get(place / 64)? >> (place % 64);
            if word != 0 {
                place += word.trailing_zeros() as usize;
                for words in self.levels[..level].iter().rev() {
                    place = place * 64 + words[place].trailing_zeros() as usize;
                }
                return Some(place);
            }
            place = place / 64 + 1;
        }
        None
    }
}

impl Rooms for Table {
    fn take(&mut self, least: usize) -> Option<(usize, usize)> {
        let room = self.next(least)?;
        let bin = self.top[room] as usize;
        self.top[room] = self.under[bin];
        if self.top[room] == BOTTOM {
            let mut place = room;
            for words in &mut self.levels {
                words[place / 64] &= !(1 << (place % 64));
                if words[place / 64] != 0 {
                    break;
                }
                place /= 64;
            }
        }
        Some((room, bin))
    }

    fn put(&mut self, room: usize, bin: usize) {
        let taken = self.levels[0][room / 64] >> (room % 64) & 1 == 1;
        if self.under.len() <= bin {
            self.under.resize(bin + 1, BOTTOM);
        }
        self.under[bin] = if taken { self.top[room] } else { BOTTOM };
        self.top[room] = bin as u32;
        let mut place = room;
        for words in &mut self.levels {
            words[place / 64] |= 1 << (place % 64);
            place /= 64;
        }
    }
}

/// A second method, slower than best fit and better where a bin holds two to four samples: fills one bin after the other,
/// with the longest sample that is left and what, of some hundred combinations, leaves the least room beside it.
/// `breadth` is how many samples are tried at each place of a combination: few keep short samples for the bins to come, and
/// many fill the first bins better. Which of the two is better depends on the lengths.
pub fn fill_each(lengths: &[i64], capacity: i64, breadth: usize) -> Vec<Vec<usize>> {
    let sorted = sorted(lengths);
    let mut left = Left::new(&sorted);
    let mut search = Search::new(breadth, MAX_TRIES.min(WORK / lengths.len().max(1)));
    let mut bins = Vec::new();
    while let Some(first) = left.longest(0) {
        bins.push(search.fill(&mut left, first, capacity).map(|place| sorted[place].1).collect());
    }
    bins
}

/// Combinations that are tried for a bin, and about how many for all bins together: bounds in work.
const MAX_TRIES: usize = 500;
const WORK: usize = 1 << 18;

/// As few bins as several methods find, and no more of them tried than `enough` asks for: it says whether so many bins
/// could not be fewer, or would not help if they were. Every length is at most `capacity`.
pub fn few_bins(lengths: &[i64], capacity: i64, enough: impl Fn(usize) -> bool) -> Vec<Vec<usize>> {
    let mut best = best_fit_decreasing(lengths, capacity);
    // With fewer tries than this for each bin the second method finds nothing.
    if lengths.len() <= WORK / 16 {
        for breadth in [4, 10, 40, MAX_TRIES] {
            if enough(best.len()) {
                break;
            }
            let bins = fill_each(lengths, capacity, breadth);
            if bins.len() < best.len() {
                best = bins;
            }
        }
    }
    best
}

/// The search for what fills a bin best.
pub(crate) struct Search {
    breadth: usize,
    max_tries: usize,
    tries: usize,
    chosen: Vec<usize>,
    best: Vec<usize>,
    best_room: i64,
}

impl Search {
    pub fn new(breadth: usize, max_tries: usize) -> Self {
        Self { breadth, max_tries, tries: 0, chosen: Vec::new(), best: Vec::new(), best_room: 0 }
    }

    /// Takes `first`, and what leaves the least room beside it: their places. Where `first` is over the capacity, it alone.
    pub fn fill(&mut self, left: &mut Left<'_>, first: usize, capacity: i64) -> impl Iterator<Item = usize> {
        left.take(first);
        let room = capacity - left.sorted[first].0;
        self.tries = self.max_tries;
        self.best_room = room.saturating_add(1);
        self.best.clear();
        self.on_top(left, 0, room);
        for place in &self.best {
            left.take(*place);
        }
        [first].into_iter().chain(self.best.iter().copied())
    }

    /// Tries samples from `place` on, longest first, on top of those that are chosen, which leave `room`.
    fn on_top(&mut self, left: &mut Left<'_>, place: usize, room: i64) {
        if room < self.best_room {
            self.best_room = room;
            self.best.clone_from(&self.chosen);
        }
        let mut place = place.max(left.place_within(room));
        for _ in 0..self.breadth {
            let Some(found) = left.longest(place).filter(|_| self.tries > 0 && self.best_room > 0) else {
                return;
            };
            self.tries -= 1;
            let length = left.sorted[found].0;
            self.chosen.push(found);
            self.on_top(left, found + 1, room - length);
            self.chosen.pop();
            // Another of the same length is as good.
            place = left.place_within(length - 1);
        }
    }
}

/// The samples by length, longest first, equal ones in input order.
pub fn longest_first(lengths: &[i64]) -> Vec<usize> {
    sorted(lengths).into_iter().map(|(_, sample)| sample).collect()
}

/// (length, sample), longest first. Looking lengths up one by one in this order would miss the cache at each.
pub(crate) fn sorted(lengths: &[i64]) -> Vec<(i64, usize)> {
    let longest = lengths.iter().copied().max().unwrap_or(0);
    let all_counted = lengths.iter().all(|length| *length >= 0);
    let mut sorted: Vec<_> = lengths.iter().copied().zip(0..).collect();
    match usize::try_from(longest) {
        // A counting sort, where there are not many more lengths than samples.
        Ok(longest) if all_counted && longest / 8 <= lengths.len() => {
            let mut place = vec![0; longest + 1];
            for length in lengths {
                place[*length as usize] += 1;
            }
            let mut before = 0;
            for place in place.iter_mut().rev() {
                before += std::mem::replace(place, before);
            }
            for (sample, length) in lengths.iter().enumerate() {
                let place = &mut place[*length as usize];
                sorted[*place] = (*length, sample);
                *place += 1;
            }
        }
        _ => sorted.sort_by_key(|(length, _)| Reverse(*length)),
    }
    sorted
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_table_and_a_tree_of_rooms_are_the_same() {
        for capacity in [1, 63, 64, 4095, 4096, 300_000] {
            let lengths: Vec<i64> = (0..3000).map(|i| 1 + (i * 7919 + i * i * 31) % capacity).collect();
            let room = capacity as usize;
            let by_table = best_fit(&lengths, room, Table::new(room));
            assert_eq!(by_table, best_fit(&lengths, room, BTreeMap::new()));
        }
    }
}
