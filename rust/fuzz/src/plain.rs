//! The rules of reading rollouts, said plainly. None: refused.

#![allow(clippy::float_cmp)] // a mask holds exactly 0 and 1

use crate::Answer;
use crate::make::{Batch, Ids, List, Numbers};

pub fn answer(batches: &[Batch]) -> Option<Answer> {
    let mut answer = Answer { packed: Some((Vec::new(), Vec::new())), ..Answer::default() };
    // Without rows there is nothing to be wrong.
    for batch in batches.iter().filter(|batch| batch.num_rows > 0) {
        let sound = list_is_sound(&batch.tokens)
            && batch.mask.as_ref().is_none_or(list_is_sound)
            && batch.length.as_ref().is_none_or(|c| c.counted)
            && batch.ids.as_ref().is_none_or(|c| c.counted && c.values.is_some());
        if !sound {
            return None;
        }
        for i in 0..batch.num_rows {
            row(batch, i, &mut answer)?;
        }
    }
    (!answer.total.is_empty()).then_some(answer)
}

fn list_is_sound(list: &List) -> bool {
    let count = list.values.values.len() as i64;
    let rows = list.starts.iter().zip(&list.ends);
    let within = rows.clone().all(|(start, end)| 0 <= *start && start <= end && *end <= count);
    let follows =
        !list.consecutive || list.starts.iter().skip(1).zip(&list.ends).all(|(start, end)| start == end);
    within && follows && list.counted && list.values.counted
}

/// A row's values; none where it or one of them is null.
fn values(list: &List, i: usize) -> Option<Vec<f64>> {
    if !list.valid[i] {
        return None;
    }
    list.values.values[list.starts[i] as usize..list.ends[i] as usize].iter().copied().collect()
}

fn row(batch: &Batch, i: usize, answer: &mut Answer) -> Option<()> {
    let tokens = values(&batch.tokens, i)?;
    let mask = match &batch.mask {
        Some(list) => Some(values(list, i)?),
        None => None,
    };
    let stated = match &batch.length {
        Some(Numbers { values, .. }) => Some(values[i]?),
        None => None,
    };
    if let Some(Ids { values: Some(ids), .. }) = &batch.ids {
        answer.ids.push(ids[i].clone()?);
    }
    let response = stated.or(mask.as_ref().map(|m| m.len() as f64))?;
    if tokens.is_empty() || !(0.0..=tokens.len() as f64).contains(&response) {
        return None;
    }
    let response = response as usize;
    let mask = mask.unwrap_or_else(|| vec![1.0; response]);
    if mask.len() != response || mask.iter().any(|m| *m != 0.0 && *m != 1.0) {
        return None;
    }
    let prompt = tokens.len() - response;
    if prompt == 0 && mask.first() == Some(&1.0) {
        return None;
    }
    answer.total.push(tokens.len() as i64);
    answer.response.push(response as i64);
    answer.mask_sum.push(mask.iter().filter(|m| **m == 1.0).count() as i64);
    let trained = |t: usize| t >= prompt && mask[t - prompt] == 1.0;
    let fits = |t: usize| {
        let least = if trained(t) { 0.0 } else { f64::from(i32::MIN) };
        (least..=f64::from(i32::MAX)).contains(&tokens[t])
    };
    let all_fit = (0..tokens.len()).all(fits);
    answer.packed = answer.packed.take().filter(|_| all_fit).map(|(mut all, mut masks)| {
        all.extend(tokens.iter().map(|t| *t as i32));
        masks.extend((1..=tokens.len()).map(|t| t < tokens.len() && trained(t)));
        (all, masks)
    });
    Some(())
}
