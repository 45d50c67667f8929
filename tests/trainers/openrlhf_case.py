"""In OpenRLHF's environment: its aggregation beside ours."""

import json

from padded_case import REAL, bare_packages, chosen_case, kit, off, unused

unused("deepspeed")
bare_packages("openrlhf", "openrlhf.models")
from openrlhf.models.loss import aggregate_loss  # noqa: E402

from rollpack.testing import padded_rows  # noqa: E402

CASE = chosen_case()


def gradient(token_level, cut, counts):
    """Summed over micro-batches, which DeepSpeed divides by their number; averaged over ranks."""
    losses = CASE.losses.clone().requires_grad_()
    for rank in cut:
        for rows in rank:
            given = counts(len(cut), len(rank))
            loss = aggregate_loss(losses[rows], CASE.mask[rows].double(), token_level, **given)
            (loss / len(rank) / len(cut)).backward()
    return losses.grad


def compared():
    """Both modes, with the counts of the step as its actor passes them (divided by the micro-batches), and without."""
    trained, filled = float(CASE.sums.sum()), float((CASE.sums > 0).sum())

    def of_step(ranks, micro_batches):
        return {"dp_size": ranks, "batch_num_tokens": trained / micro_batches, "global_batch_size": filled / micro_batches}

    rows = []
    for mode, token_level, ours in (
        ("token-mean", True, "token_mean"),
        ("seq-mean-token-mean", False, "sample_mean"),
    ):
        expected = CASE.weights(ours, empty="skip")
        for how, counts in (("aggregate_loss", of_step), ("aggregate_loss without counts", lambda *_: {})):
            for name, cut in CASE.cuts().items():
                found = gradient(token_level, cut, counts)
                rows.append({"function": f"OpenRLHF {how}", "mode": mode, "cut": name, "off": off(found, expected)})
    return rows


def checked():
    """The kit on both modes, with the counts of the step; DeepSpeed divides by the micro-batches."""

    def reducer(token_level):
        def call(x, m):
            tokens, rows = m.num_tokens / m.num_micro_batches, m.num_rollouts / m.num_micro_batches
            mask = padded_rows(m.loss_mask, m).double()
            return aggregate_loss(padded_rows(x, m), mask, token_level, m.dp_size, tokens, rows)

        return call

    return [
        kit("OpenRLHF aggregate_loss", "token-mean", reducer(True), "token_mean", backend="deepspeed", empty="skip"),
        kit(
            "OpenRLHF aggregate_loss",
            "seq-mean-token-mean",
            reducer(False),
            "sample_mean",
            backend="deepspeed",
            empty="skip",
        ),
    ]


if __name__ == "__main__":
    print(json.dumps({"compared": compared(), "kit": checked() if REAL else []}))
