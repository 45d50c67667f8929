//! Packing by budget: as few micro-batches as a hard cap on their tokens allows.

use std::cmp::Reverse;
use std::collections::BTreeMap;
use std::iter::repeat_n;

use crate::left::Left;

/// Lists of samples, one after the other in one piece of memory: tens of thousands of short lists take longer to allocate
/// and free than to fill.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Bins {
    samples: Vec<usize>,
    ends: Vec<usize>,
}

impl Bins {
    pub fn len(&self) -> usize {
        self.ends.len()
    }

    pub fn is_empty(&self) -> bool {
        self.ends.is_empty()
    }

    /// The samples of one bin.
    pub fn get(&self, bin: usize) -> &[usize] {
        let begin = bin.checked_sub(1).map_or(0, |before| self.ends[before]);
        &self.samples[begin..self.ends[bin]]
    }

    pub fn iter(&self) -> impl Iterator<Item = &[usize]> {
        (0..self.len()).map(|bin| self.get(bin))
    }

    /// As lists that can grow and shrink.
    pub fn lists(&self) -> Vec<Vec<usize>> {
        self.iter().map(<[usize]>::to_vec).collect()
    }

    pub(crate) fn push(&mut self, samples: impl IntoIterator<Item = usize>) {
        self.samples.extend(samples);
        self.ends.push(self.samples.len());
    }

    /// Appends empty bins until there are `len`.
    pub(crate) fn pad(&mut self, len: usize) {
        self.ends.resize(len.max(self.len()), self.samples.len());
    }

    /// Brings the samples of each bin in input order.
    pub(crate) fn sort_each(&mut self) {
        let mut begin = 0;
        for end in &self.ends {
            self.samples[begin..*end].sort_unstable();
            begin = *end;
        }
    }
}

impl<T: IntoIterator<Item = usize>> FromIterator<T> for Bins {
    fn from_iter<I: IntoIterator<Item = T>>(bins: I) -> Self {
        let mut collected = Self::default();
        for bin in bins {
            collected.push(bin);
        }
        collected
    }
}

/// Best fit decreasing: each sample, longest first, goes where it leaves the least room. Every length is at most
/// `capacity`, and there are fewer than 2^32 of them. Ties go to the earlier sample and, among equally full bins, to the one
/// filled last, so the same input gives the same bins. O(n + capacity), and O(n log n) where the capacity is so large that a
/// table of it would not pay.
pub fn best_fit_decreasing(lengths: &[i64], capacity: i64) -> Bins {
    /// The largest table of rooms: 32 MiB, of which only what is used is ever touched.
    const MAX_TABLE: usize = 1 << 22;
    // What holds everything is as good as what holds more.
    let all = lengths.iter().fold(0i64, |sum, length| sum.saturating_add(*length));
    let capacity = usize::try_from(capacity.min(all)).unwrap_or(0);
    if capacity < MAX_TABLE {
        best_fit(lengths, capacity, Table::new(capacity))
    } else {
        best_fit(lengths, capacity, BTreeMap::new())
    }
}

fn best_fit(lengths: &[i64], capacity: usize, mut rooms: impl Rooms) -> Bins {
    let mut sizes: Vec<u32> = Vec::new();
    let fit = |length: usize| {
        let (room, bin) = rooms.take(length).unwrap_or_else(|| {
            sizes.push(0);
            (capacity, sizes.len() - 1)
        });
        sizes[bin] += 1;
        rooms.put(room - length, bin);
        bin as u32
    };
    let mut bin_of: Vec<u32> = Vec::with_capacity(lengths.len());
    if let Some(counts) = counts(lengths) {
        // How many there are of each length is all that fitting asks for. Which samples these are is seen when the bins
        // are filled, in input order: nothing is sorted.
        let longest_first = counts.iter().enumerate().rev();
        bin_of.extend(longest_first.flat_map(|(length, n)| repeat_n(length, *n as usize)).map(fit));
        let mut places = places(counts);
        let bins: Vec<u32> = lengths
            .iter()
            .map(|length| {
                let place = &mut places[*length as usize];
                *place += 1;
                bin_of[*place as usize - 1]
            })
            .collect();
        filled(&sizes, (0..).zip(bins))
    } else {
        let sorted = sorted(lengths);
        bin_of.extend(sorted.iter().map(|(length, _)| *length as usize).map(fit));
        filled(&sizes, sorted.into_iter().map(|(_, sample)| sample).zip(bin_of))
    }
}

/// Bins of these sizes, from pairs (sample, its bin). In 32 bits, as more of it is in the cache.
pub(crate) fn filled(sizes: &[u32], samples: impl Iterator<Item = (usize, u32)>) -> Bins {
    // Where each bin begins, and when it is filled, where it ends.
    let mut end = 0;
    let begin = |size: &u32| {
        end += *size as usize;
        end - *size as usize
    };
    let mut ends: Vec<usize> = sizes.iter().map(begin).collect();
    let mut filled = vec![0; end];
    for (sample, bin) in samples {
        let place = &mut ends[bin as usize];
        filled[*place] = sample;
        *place += 1;
    }
    Bins { samples: filled, ends }
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
            let word = &mut words[place / 64];
            let known = *word != 0;
            *word |= 1 << (place % 64);
            if known {
                break; // and so are those above
            }
            place /= 64;
        }
    }
}

/// A second method, slower than best fit and better where a bin holds two to four samples: fills one bin after the other,
/// with the longest sample that is left and what, of some hundred combinations, leaves the least room beside it.
/// `breadth` is how many samples are tried at each place of a combination: few keep short samples for the bins to come, and
/// many fill the first bins better. Which of the two is better depends on the lengths.
pub fn fill_each(lengths: &[i64], capacity: i64, breadth: usize) -> Bins {
    let sorted = sorted(lengths);
    let mut left = Left::new(&sorted);
    let mut search = Search::new(breadth, MAX_TRIES.min(WORK / lengths.len().max(1)));
    let mut bins = Bins::default();
    while let Some(first) = left.longest(0) {
        bins.push(search.fill(&mut left, first, capacity).map(|place| sorted[place].1));
    }
    bins
}

/// Combinations that are tried for a bin, and about how many for all bins together: bounds in work.
const MAX_TRIES: usize = 500;
const WORK: usize = 1 << 18;

/// As few bins as several methods find, and no more of them tried than `enough` asks for: it says whether so many bins
/// could not be fewer, or would not help if they were. Every length is at most `capacity`.
pub fn few_bins(lengths: &[i64], capacity: i64, enough: impl Fn(usize) -> bool) -> Bins {
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
    let Some(counts) = counts(lengths) else {
        let mut sorted: Vec<_> = lengths.iter().copied().zip(0..).collect();
        sorted.sort_by_key(|(length, _)| Reverse(*length));
        return sorted;
    };
    let mut places = places(counts);
    let mut sorted = vec![(0, 0); lengths.len()];
    for (sample, length) in lengths.iter().enumerate() {
        let place = &mut places[*length as usize];
        sorted[*place as usize] = (*length, sample);
        *place += 1;
    }
    sorted
}

/// How many there are of each length, where there are not many more lengths than samples.
fn counts(lengths: &[i64]) -> Option<Vec<u32>> {
    let longest = usize::try_from(lengths.iter().copied().max()?).ok()?;
    if longest / 8 > lengths.len() || lengths.iter().any(|length| *length < 0) {
        return None;
    }
    let mut counts = vec![0; longest + 1];
    for length in lengths {
        counts[*length as usize] += 1;
    }
    Some(counts)
}

/// Where the samples of each length begin, longest first.
fn places(mut counts: Vec<u32>) -> Vec<u32> {
    let mut before = 0;
    for place in counts.iter_mut().rev() {
        before += std::mem::replace(place, before);
    }
    counts
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
