//! What a sample costs a rank: the one model behind planning and simulation.

use crate::Result;
use crate::error::plan_error;

/// Units of work. Sums saturate instead of wrapping around.
pub type Cost = u128;

/// `linear * s + quadratic * s * s` for a sample of s (padded) tokens.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct CostModel {
    pub linear: u64,
    pub quadratic: u64,
}

impl CostModel {
    /// Every token costs the same.
    pub const TOKENS: Self = Self { linear: 1, quadratic: 0 };
    /// A transformer in which attention costs as much as all else at 24,576 tokens.
    pub const ATTENTION: Self = Self { linear: 24_576, quadratic: 1 };

    pub fn new(linear: u64, quadratic: u64) -> Result<Self> {
        if linear == 0 && quadratic == 0 {
            return plan_error!(
                "a cost model of 0 for every sample balances nothing; give linear or quadratic a value"
            );
        }
        Ok(Self { linear, quadratic })
    }

    /// `tokens` is below 2^31, so the cost of one sample fits 128 bits.
    pub fn cost(&self, tokens: i64) -> Cost {
        let s = Cost::from(tokens.unsigned_abs());
        Cost::from(self.linear) * s + Cost::from(self.quadratic) * s * s
    }
}

pub fn total(costs: impl IntoIterator<Item = Cost>) -> Cost {
    costs.into_iter().fold(0, Cost::saturating_add)
}
