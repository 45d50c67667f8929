"""What a trainer does to gradients, and the factor on the loss that undoes it."""

from __future__ import annotations

from rollpack._arguments import flag, integer
from rollpack._errors import PlanError

BACKENDS = (
    "none",
    "ddp",
    "fsdp",
    "accelerate",
    "deepspeed",
    "hf_trainer",
    "hf_trainer_scaled",
    "hf_trainer_num_items",
    "megatron",
    "megatron_legacy",
    "megatron_per_token",
)


def gradient_factor(
    backend: str,
    *,
    dp_size: int,
    cp_size: int,
    num_micro_batches: int | None,
    num_tokens: int | None = None,
    accumulation_steps: int | None = None,
    own_accumulation_boundary: bool = False,
) -> int:
    """What each rank's partial sum is multiplied by, so that the trainer's gradient is that of the step loss.

    ========================  ==============================================================  =======
    backend                   what the trainer does                                           factor
    ========================  ==============================================================  =======
    ``none``                  nothing (one process), or it sums over ranks                    1
    ``ddp``, ``fsdp``         averages over the dp x cp group                                 D C
    ``accelerate``            averages over ranks, divides the loss by its configured G       D C G
    ``deepspeed``             the same                                                        D C G
    ``hf_trainer``            the same, with the micro-batches of its window for G            D C G
    ``hf_trainer_scaled``     takes the loss as it is, averages over ranks                    D C
    ``hf_trainer_num_items``  multiplies the loss by the number of processes, then averages   1
    ``megatron``              three values returned, count 1: averages over D C, divides by K K D C
    ``megatron_legacy``       two values: as above, and the schedule multiplies by C          K D
    ``megatron_per_token``    divides by the all-reduced token count, which is T              T
    ========================  ==============================================================  =======

    Hugging Face's Trainer divides the loss by the number of micro-batches in its window
    (``trainer.current_gradient_accumulation_steps``, which the end of an epoch cuts short), unless it takes the loss for
    scaled already. ``loss_is_scaled_for_ga`` of your subclass that overrides ``compute_loss`` says which: False is
    ``hf_trainer``, True is ``hf_trainer_scaled``. Left at None, and in versions that do not know it, the loss counts as
    scaled if the Trainer has a ``compute_loss_func``, or if the model's forward takes ``**kwargs`` and the inputs have
    ``labels``. If it does, and ``compute_loss`` is the Trainer's own, the Trainer also multiplies by the number of
    processes, provided that the inputs have ``labels`` and ``average_tokens_across_devices`` is set, as it is by default:
    ``hf_trainer_num_items``. It clips gradients to 1.0 unless ``max_grad_norm`` is 0.

    Args:
        backend: one of the names above.
        dp_size: D.
        cp_size: C. Gradients have to be averaged over the dp x cp group: a group without cp would count cp twice.
        num_micro_batches: K, of each rank in this step; None where it is not known and not
            needed.
        num_tokens: T of the step, for ``megatron_per_token``.
        accumulation_steps: G, the ``gradient_accumulation_steps`` that Accelerate or DeepSpeed is configured with, or the
            micro-batches in the window of the Trainer.
        own_accumulation_boundary: says that you set the boundary of the optimizer step yourself, so that G may differ
            from K.

    Raises:
        PlanError: an unknown backend, a missing or needless argument, or a G that differs from K.

    >>> [gradient_factor(name, dp_size=4, cp_size=2, num_micro_batches=3) for name in ("none", "fsdp", "megatron")]
    [1, 8, 24]
    """
    dp_size, cp_size = integer("dp_size", dp_size, least=1), integer("cp_size", cp_size, least=1)
    if num_micro_batches is not None:
        num_micro_batches = integer("num_micro_batches", num_micro_batches, least=1)
    flag("own_accumulation_boundary", own_accumulation_boundary)
    accumulates = backend in {"accelerate", "deepspeed", "hf_trainer"}
    if not accumulates and (accumulation_steps is not None or own_accumulation_boundary):
        raise PlanError(f"accumulation_steps= is for accelerate, deepspeed and hf_trainer; backend {backend!r} takes none")
    match backend:
        case "none" | "hf_trainer_num_items":
            return 1
        case "ddp" | "fsdp" | "hf_trainer_scaled":
            return dp_size * cp_size
        case "accelerate" | "deepspeed" | "hf_trainer":
            steps = _accumulation(backend, accumulation_steps, num_micro_batches, own_accumulation_boundary)
            return dp_size * cp_size * steps
        case "megatron":
            return _known(backend, num_micro_batches) * dp_size * cp_size
        case "megatron_legacy":
            return _known(backend, num_micro_batches) * dp_size
        case "megatron_per_token":
            if num_tokens is None:
                raise PlanError("backend 'megatron_per_token' needs num_tokens, the trained tokens of the whole step")
            return integer("num_tokens", num_tokens, least=0)
        case _:
            raise PlanError(f"backend is {backend!r}; it has to be one of {', '.join(BACKENDS)}")


def _known(backend: str, num_micro_batches: int | None) -> int:
    if num_micro_batches is None:
        raise PlanError(
            f"backend {backend!r} needs the number of micro-batches in the step, which is not known while it arrives: plan "
            "each step when all of it is there"
        )
    return num_micro_batches


def _accumulation(backend: str, steps: int | None, num_micro_batches: int | None, own_boundary: bool) -> int:
    if steps is None:
        raise PlanError(f"backend {backend!r} needs accumulation_steps=, its configured gradient_accumulation_steps")
    steps = integer("accumulation_steps", steps, least=1)
    if not own_boundary and steps != _known(backend, num_micro_batches):
        raise PlanError(
            f"{backend} is configured with accumulation_steps {steps}, and this step has {num_micro_batches} micro-batches "
            "on each rank, so its optimizer would not step at the end of it. Configure the same number, or set the "
            "accumulation boundary yourself and pass own_accumulation_boundary=True"
        )
    return steps
