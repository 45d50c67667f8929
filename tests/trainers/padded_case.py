"""What the scripts share that run beside a trainer's code: a padded batch, its weights by hand, and cuts of it."""

import importlib.util
import sys
import types
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import torch

from rollpack import _reference
from rollpack.testing import check_reducer, make_rollouts, token_losses

#: Whether a script is asked for the real batch.
REAL = sys.argv[1:2] == ["real"]
TRACES = Path(__file__).parents[3] / "shared" / "data"


class Case:
    """Rows padded to one width: ``losses`` float64 and ``mask`` bool [B, W]; ``groups`` [B] and ``lengths`` [B]."""

    def __init__(self, table):
        lists = table["loss_mask"].to_pylist()
        self.rows, self.width = len(lists), max(map(len, lists))
        self.groups = np.array(table["group_index"].to_pylist())
        self.lengths = np.array([len(tokens) for tokens in table["tokens"].to_pylist()])
        values = np.split(
            token_losses(np.array([len(mask) for mask in lists])), np.cumsum([len(mask) for mask in lists])[:-1]
        )
        self.mask = torch.zeros(self.rows, self.width, dtype=torch.bool)
        self.losses = torch.zeros(self.rows, self.width, dtype=torch.float64)
        for i, (mask, value) in enumerate(zip(lists, values, strict=True)):
            self.mask[i, : len(mask)] = torch.tensor(mask, dtype=torch.bool)
            self.losses[i, : len(mask)] = torch.from_numpy(np.asarray(value))
        self.sums = self.mask.sum(1)

    def weights(self, mode, **options):
        """[B, W] float64, by the plain reference; each row is a rollout."""
        masks = [mask.numpy() for mask in self.mask]
        rollouts = options.pop("rollouts", range(self.rows))
        rows = _reference.step_gradient(mode, masks, rollouts, self.groups.tolist(), **options)
        return torch.from_numpy(np.stack(rows))

    def cuts(self):
        """Name → for each rank its micro-batches, as lists of rows: as many in each."""
        rows = list(range(self.rows))
        half, quarter = self.rows // 2, self.rows // 4
        return {
            "uncut": [[rows]],
            "4 ranks": [[rows[i * quarter : (i + 1) * quarter]] for i in range(4)],
            "2 ranks x 4 micro-batches": [np.array_split(rows[:half], 4), np.array_split(rows[half:], 4)],
        }


def real_case():
    """The real rollouts of a tool-using agent, one row each, in whole groups."""
    return Case(pq.read_table(TRACES / "tau_bench_airline.parquet"))


def made_up_case():
    """Made-up rows, one each of their rollouts, in groups of 4; one has no trained token."""
    table = make_rollouts(3, prompts=24, longest=512)
    (first,) = np.unique(table["rollout_id"].to_numpy(), return_index=True)[1:]
    table = table.take(first)
    groups = table["group_index"].to_numpy()
    kept = np.concatenate([np.flatnonzero(groups == g)[:4] for g in np.unique(groups) if (groups == g).sum() >= 4])
    case = Case(table.take(kept[: len(kept) // 16 * 16]))
    case.mask[1] = False
    case.sums = case.mask.sum(1)
    return case


def kit(function, mode, reducer, loss_aggregation, takes_losses=True, **options):
    """What ``check_reducer`` finds where sequences are whole, as these functions see them under context parallelism too.

    Masked values are left out where a function takes log-probabilities, through which they would have to go.
    """
    report = check_reducer(reducer, loss_aggregation=loss_aggregation, **options)
    causes = dict.fromkeys(
        cause
        for failure in report.failures
        if " x cp 1," in failure.where and (takes_losses or failure.invariance != "masked values")
        for cause in failure.cause.split(" + ")
    )
    return {"function": function, "mode": mode, "causes": list(causes)}


def as_policy_loss(losses):
    """Log-probabilities and advantages whose clipped policy loss is these losses, in value and derivative."""
    values = losses.detach()
    return (losses - values) / torch.where(values == 0, 1.0, values), -values


def off(found, expected):
    """max|g - g0| / max|g0|."""
    return float((found - expected).abs().max() / expected.abs().max())


def chosen_case():
    """The real one if it is asked for."""
    return real_case() if REAL else made_up_case()


def bare_packages(*names):
    """Lets a module be imported without what its packages import, of which it uses nothing."""
    root = names[0].partition(".")[0]
    (home,) = importlib.util.find_spec(root).submodule_search_locations
    for name in names:
        package = types.ModuleType(name)
        package.__path__ = [str(Path(home, *name.split(".")[1:]))]
        sys.modules[name] = package


def unused(name, *attributes):
    """A module that is imported by what is under test, and not used there."""
    module = types.ModuleType(name)
    for attribute in attributes:
        setattr(module, attribute, object)
    sys.modules[name] = module
