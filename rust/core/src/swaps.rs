//! The last per mille: samples swapped between the heaviest part and light ones.

use std::collections::BTreeSet;
use std::ops::Range;

use crate::cost::{Cost, total};

/// Swaps samples between the heaviest part and light ones while that makes the heavier of the two lighter. A part is
/// `per_part` bins in a row. The number of samples in a bin stays, and so does the cap.
pub(crate) fn even_out(
    bins: &mut [Vec<usize>],
    per_part: usize,
    lengths: &[i64],
    costs: &[Cost],
    capacity: i64,
) {
    /// How many light parts are tried for a swap, and how many swaps are made for each part: bounds in work.
    const PARTNERS: usize = 8;
    const SWAPS: usize = 16;
    /// A part that is heavier than the mean by less than one in so many is even.
    const EVEN: Cost = 10_000;
    let num_parts = bins.len().div_ceil(per_part);
    let mut by_load: BTreeSet<(Cost, usize)> =
        bins.chunks(per_part).map(|part| total(part.iter().flatten().map(|s| costs[*s]))).zip(0..).collect();
    let even = total(by_load.iter().map(|(load, _)| *load)) / num_parts.max(1) as Cost;
    let mut room: Vec<i64> = bins.iter().map(|bin| room_in(bin, lengths, capacity)).collect();
    let mut parts: Vec<Vec<Member>> = vec![Vec::new(); num_parts];
    for _ in 0..SWAPS * num_parts {
        let Some(&(load, heavy)) = by_load.last() else { return };
        if load <= even + even / EVEN {
            return;
        }
        let light: Vec<_> = by_load.iter().copied().take(PARTNERS.min(num_parts - 1)).collect();
        for part in light.iter().map(|(_, part)| *part).chain([heavy]) {
            if parts[part].is_empty() {
                parts[part] = members(bins, part * per_part..bins.len().min((part + 1) * per_part), costs);
            }
        }
        let swap = light.into_iter().find_map(|(lighter, part)| {
            let allowed = |a: &Member, b: &Member| {
                let longer = lengths[bins[a.bin][a.place]].saturating_sub(lengths[bins[b.bin][b.place]]);
                longer <= room[b.bin] && longer.saturating_neg() <= room[a.bin]
            };
            let (i, j) = best_swap(&parts[heavy], &parts[part], load - lighter, allowed)?;
            Some((lighter, part, i, j))
        });
        let Some((lighter, light, i, j)) = swap else { return };
        let (a, b) = (parts[heavy][i], parts[light][j]);
        let longer = lengths[bins[a.bin][a.place]] - lengths[bins[b.bin][b.place]];
        room[a.bin] += longer;
        room[b.bin] -= longer;
        let sample = bins[a.bin][a.place];
        bins[a.bin][a.place] = std::mem::replace(&mut bins[b.bin][b.place], sample);
        replace(&mut parts[heavy], i, Member { cost: b.cost, ..a });
        replace(&mut parts[light], j, Member { cost: a.cost, ..b });
        for (old, part, new) in
            [(load, heavy, load - (a.cost - b.cost)), (lighter, light, lighter + (a.cost - b.cost))]
        {
            by_load.remove(&(old, part));
            by_load.insert((new, part));
        }
    }
}

fn room_in(bin: &[usize], lengths: &[i64], capacity: i64) -> i64 {
    bin.iter().fold(capacity, |room, sample| room.saturating_sub(lengths[*sample]))
}

/// A sample of a part: what it costs and where it is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
struct Member {
    cost: Cost,
    bin: usize,
    place: usize,
}

fn members(bins: &[Vec<usize>], of: Range<usize>, costs: &[Cost]) -> Vec<Member> {
    let in_bin = |bin: usize| (0..bins[bin].len()).map(move |place| (bin, place));
    let mut members: Vec<Member> = of
        .flat_map(in_bin)
        .map(|(bin, place)| Member { cost: costs[bins[bin][place]], bin, place })
        .collect();
    members.sort_unstable();
    members
}

/// Puts another member in the place of one, and keeps the order.
fn replace(members: &mut Vec<Member>, old: usize, new: Member) {
    members.remove(old);
    let place = members.partition_point(|member| *member < new);
    members.insert(place, new);
}

/// The pair whose costs differ by closest to half of `gap`, among those tried that lower the heavier part and are
/// `allowed`. Both parts are sorted by cost.
fn best_swap(
    heavy: &[Member],
    light: &[Member],
    gap: Cost,
    allowed: impl Fn(&Member, &Member) -> bool,
) -> Option<(usize, usize)> {
    /// How many samples of the heavier part are tried, spread over all of its costs: a bound in work.
    const ITEMS: usize = 1024;
    let mut best: Option<(Cost, usize, usize)> = None;
    for (i, item) in heavy.iter().enumerate().step_by(heavy.len().div_ceil(ITEMS).max(1)) {
        let near = light.partition_point(|other| other.cost < item.cost.saturating_sub(gap / 2));
        // Those next to what is wanted, and then ever closer to the item's own cost, for which there is room more often.
        let beyond = (1..).map(|n| near + (1 << n)).take_while(|j| *j < light.len());
        for j in (near.saturating_sub(1)..light.len().min(near + 2)).chain(beyond) {
            let other = light[j];
            if other.cost >= item.cost {
                break;
            }
            let differ = item.cost - other.cost;
            let off = differ.abs_diff(gap / 2);
            if differ < gap && best.is_none_or(|(least, ..)| off < least) && allowed(item, &other) {
                best = Some((off, i, j));
            }
        }
    }
    best.map(|(_, i, j)| (i, j))
}
