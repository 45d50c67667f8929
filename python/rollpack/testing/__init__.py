"""Cut a batch in many ways and hold losses and gradients against the plain float64 reference."""

from rollpack.testing.cuts import Cut, cuts
from rollpack.testing.kit import Failure, Report, TrainingStep, check_reducer, check_trainer, padded_rows
from rollpack.testing.rollouts import Rollouts, make_rollouts, token_losses
from rollpack.testing.verify import TOLERANCES, Agreement, verify

__all__ = [
    "TOLERANCES",
    "Agreement",
    "Cut",
    "Failure",
    "Report",
    "Rollouts",
    "TrainingStep",
    "check_reducer",
    "check_trainer",
    "cuts",
    "make_rollouts",
    "padded_rows",
    "token_losses",
    "verify",
]
