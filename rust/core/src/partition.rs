//! Items into parts that cost as nearly the same as may be, without a cap: by LPT and by differencing.

use std::cmp::Reverse;
use std::collections::BinaryHeap;

use crate::cost::{Cost, total};

/// Longest processing time first: items, heaviest first, each to the lightest part that has room for one more.
/// The limits add up to at least the number of items, if need be with one more in each of `extra` parts.
pub fn lpt(costs: &[Cost], limits: &[usize], mut extra: usize) -> Vec<Vec<usize>> {
    let mut parts = vec![Vec::new(); limits.len()];
    let mut lightest: BinaryHeap<_> = (0..limits.len()).map(|part| Reverse((0, part))).collect();
    for item in heaviest_first(costs) {
        while let Some(Reverse((load, part))) = lightest.pop() {
            let taken = parts[part].len();
            if taken >= limits[part] {
                if extra == 0 || taken > limits[part] {
                    continue; // it is full, and stays so
                }
                extra -= 1;
            }
            parts[part].push(item);
            lightest.push(Reverse((costs[item].saturating_add(load), part)));
            break;
        }
    }
    parts
}

/// The better of LPT and differencing, where parts may hold any number of items.
pub fn partition(costs: &[Cost], num_parts: usize) -> Vec<Vec<usize>> {
    let by_lpt = lpt(costs, &vec![costs.len(); num_parts], 0);
    let by_differencing = differencing(costs, num_parts);
    let heaviest = |parts: &[Vec<usize>]| parts.iter().map(|part| cost_of(part, costs)).max();
    if heaviest(&by_differencing) < heaviest(&by_lpt) { by_differencing } else { by_lpt }
}

/// Karmarkar and Karp's largest differencing: partial partitions, at first one for each item, are merged, always the two
/// that are most uneven, the heavy parts of one with the light parts of the other. Parts without an item are not held, so
/// that most merges are short.
pub fn differencing(costs: &[Cost], num_parts: usize) -> Vec<Vec<usize>> {
    /// What each part costs and the item that stands for it, heaviest first. Other items of it point to that one.
    type Parts = Vec<(Cost, usize)>;
    let uneven = |parts: &Parts| {
        let lightest = if parts.len() < num_parts { 0 } else { parts.last().map_or(0, |part| part.0) };
        parts.first().map_or(0, |part| part.0) - lightest
    };
    let mut root: Vec<usize> = (0..costs.len()).collect();
    let mut partitions: Vec<Parts> = costs.iter().zip(0..).map(|(cost, item)| vec![(*cost, item)]).collect();
    let mut heap: BinaryHeap<_> =
        partitions.iter().enumerate().map(|(i, parts)| (uneven(parts), Reverse(i))).collect();
    while let (Some((_, Reverse(a))), Some((_, Reverse(b)))) = (heap.pop(), heap.pop()) {
        let (mut merged, other) = (std::mem::take(&mut partitions[a]), std::mem::take(&mut partitions[b]));
        // The heaviest get parts that are free, the next ones join the lightest that there are.
        let (keep, join) = other.split_at(other.len().min(num_parts - merged.len()));
        for ((cost, item), (more, joining)) in merged.iter_mut().rev().zip(join) {
            *cost = cost.saturating_add(*more);
            root[*joining] = *item;
        }
        merged.extend_from_slice(keep);
        merged.sort_unstable_by_key(|(cost, item)| (Reverse(*cost), *item));
        heap.push((uneven(&merged), Reverse(a)));
        partitions[a] = merged;
    }
    let mut part_of = vec![0; costs.len()];
    let heads = partitions.into_iter().flatten().map(|(_, item)| item);
    for (part, item) in heads.enumerate() {
        part_of[item] = part;
    }
    let mut parts = vec![Vec::new(); num_parts];
    for item in 0..costs.len() {
        let mut at = item;
        while root[at] != at {
            root[at] = root[root[at]];
            at = root[at];
        }
        parts[part_of[at]].push(item);
    }
    parts
}

pub(crate) fn heaviest_first(costs: &[Cost]) -> Vec<usize> {
    let mut order: Vec<usize> = (0..costs.len()).collect();
    order.sort_by_key(|i| Reverse(costs[*i]));
    order
}

pub(crate) fn cost_of(samples: &[usize], costs: &[Cost]) -> Cost {
    total(samples.iter().map(|s| costs[*s]))
}
