//! Packing by budget: as few micro-batches as a hard cap on their tokens allows.

use std::collections::BTreeMap;

/// Best fit decreasing: each sample, longest first, goes where it leaves the least room. Every length is at most
/// `capacity`. Ties go to the earlier sample and the fuller, later bin, so the same input gives the same bins.
pub fn best_fit_decreasing(lengths: &[i64], capacity: i64) -> Vec<Vec<usize>> {
    let mut bins: Vec<Vec<usize>> = Vec::new();
    let mut by_room: BTreeMap<i64, Vec<usize>> = BTreeMap::new();
    for sample in longest_first(lengths) {
        let length = lengths[sample];
        let fit = by_room
            .range_mut(length..)
            .next()
            .and_then(|(room, open)| Some((*room, open.pop()?, open.is_empty())));
        let (room, bin) = if let Some((room, bin, emptied)) = fit {
            if emptied {
                by_room.remove(&room);
            }
            (room, bin)
        } else {
            bins.push(Vec::new());
            (capacity, bins.len() - 1)
        };
        bins[bin].push(sample);
        by_room.entry(room - length).or_default().push(bin);
    }
    bins
}

/// The samples by length, longest first, equal ones in input order.
pub fn longest_first(lengths: &[i64]) -> Vec<usize> {
    let mut order: Vec<usize> = (0..lengths.len()).collect();
    order.sort_by_key(|i| std::cmp::Reverse(lengths[*i]));
    order
}
