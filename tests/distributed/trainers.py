"""One training loop for each way that gradients are averaged, each with its real library.

Read a function as how to use rollpack with that library. All take a :class:`Job` and do the same training.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cache, partial
from typing import Any
from unittest import mock

import tiny
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.nn.parallel import DistributedDataParallel

from rollpack import MicroBatch
from rollpack.torch import LossReducer


@dataclass
class Job:
    """What one rank trains: a fresh model on the micro-batches of a step, ``steps`` times."""

    model: tiny.TinyTransformer
    micro_batches: list[MicroBatch[torch.Tensor]]
    dp_size: int
    cp_size: int
    steps: int = 3
    gradient: tiny.Tensors = field(default_factory=dict)
    logged: dict[str, float] = field(default_factory=dict)

    @property
    def accumulation_steps(self) -> int:
        return len(self.micro_batches)

    def saw(self, of: Callable[[torch.nn.Parameter], torch.Tensor] = lambda p: p.grad) -> None:
        """Keeps the first averaged gradient. Called before the optimizer steps."""
        self.gradient = self.gradient or tiny.copy(self.model, of)


def none(job: Job) -> None:
    """Gradients summed over all ranks by hand."""
    reducer = LossReducer(backend="none", mesh=dist.group.WORLD)
    optimizer = tiny.adamw(job.model.parameters())
    for _ in range(job.steps):
        with reducer.step():  # notices a micro-batch that is left out or comes twice
            for micro_batch in job.micro_batches:
                tiny.loss(reducer, job.model(micro_batch), micro_batch).backward()
        for parameter in job.model.parameters():
            dist.all_reduce(parameter.grad)
        job.saw()
        optimizer.step()
        optimizer.zero_grad()


def ddp(job: Job, *, no_sync: bool, backend: str = "ddp") -> None:
    """DistributedDataParallel over the dp x cp group; with no_sync it averages once, after the last micro-batch."""
    reducer = LossReducer(backend=backend, mesh=dist.group.WORLD)
    model = DistributedDataParallel(job.model)
    optimizer = tiny.adamw(model.parameters())
    for _ in range(job.steps):
        with reducer.step():
            for micro_batch in job.micro_batches:
                last = micro_batch.index == micro_batch.num_micro_batches - 1
                with model.no_sync() if no_sync and not last else contextlib.nullcontext():
                    tiny.loss(reducer, model(micro_batch), micro_batch).backward()
        job.saw()
        optimizer.step()
        optimizer.zero_grad()


def fsdp(job: Job, *, replicas: int = 1, sums: bool = False) -> None:
    """FSDP2 over the dp x cp ranks, or hybrid: sharded within each of ``replicas`` groups."""
    ranks = dist.get_world_size()
    replicas = min(replicas, ranks)
    shape = {"replicate": replicas, "shard": ranks // replicas} if replicas > 1 else {"shard": ranks}
    mesh = init_device_mesh("cpu", tuple(shape.values()), mesh_dim_names=tuple(shape))
    for module in [*job.model.layers, job.model]:
        fully_shard(module, mesh=mesh)
    if sums:  # as torchtitan does; it has to be said to every module that is sharded
        for module in job.model.modules():
            if isinstance(module, FSDPModule):
                module.set_gradient_divide_factor(1.0)
                module.set_force_sum_reduction_for_comms(True)  # gloo has no other
    reducer = LossReducer(backend="none" if sums else "fsdp", mesh=dist.group.WORLD)
    optimizer = tiny.adamw(job.model.parameters())
    for _ in range(job.steps):
        with reducer.step():
            for micro_batch in job.micro_batches:
                tiny.loss(reducer, job.model(micro_batch), micro_batch).backward()
        job.saw()
        optimizer.step()
        optimizer.zero_grad()


def accelerate(job: Job) -> None:
    """Accelerate, with as many accumulation steps as there are micro-batches."""
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState

    AcceleratorState._reset_state(reset_partial_state=True)
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=job.accumulation_steps)
    assert accelerator.num_processes == dist.get_world_size()
    reducer = LossReducer(backend="accelerate", mesh=dist.group.WORLD, accumulation_steps=job.accumulation_steps)
    model, optimizer = accelerator.prepare(job.model, tiny.adamw(job.model.parameters()))
    for _ in range(job.steps):
        for micro_batch in job.micro_batches:
            with accelerator.accumulate(model):
                accelerator.backward(tiny.loss(reducer, model(micro_batch), micro_batch))
                if accelerator.sync_gradients:
                    job.saw()
                optimizer.step()
                optimizer.zero_grad()


def deepspeed(job: Job, *, stage: int) -> None:
    """DeepSpeed ZeRO. It clips to 1.0 unless told not to."""
    import deepspeed
    from deepspeed.utils import safe_get_full_grad

    engine, *_ = deepspeed.initialize(
        model=job.model,
        optimizer=tiny.adamw(job.model.parameters()),
        dist_init_required=False,
        config={
            "train_micro_batch_size_per_gpu": 1,
            "gradient_accumulation_steps": job.accumulation_steps,
            "gradient_clipping": 0.0,
            "zero_optimization": {"stage": stage},
            "zero_allow_untested_optimizer": True,
        },
    )
    reducer = LossReducer(backend="deepspeed", mesh=dist.group.WORLD, accumulation_steps=job.accumulation_steps)
    for _ in range(job.steps):
        for micro_batch in job.micro_batches:
            engine.backward(tiny.loss(reducer, engine(micro_batch), micro_batch))
            if engine.is_gradient_accumulation_boundary():
                job.saw(safe_get_full_grad)
            engine.step()


def hf_trainer(job: Job, *, backend: str, window: int = 0) -> None:
    """Hugging Face's Trainer, an epoch a step. It clips to 1.0 unless ``max_grad_norm`` is 0.

    Args:
        job: the job.
        backend: ``hf_trainer`` and ``hf_trainer_scaled``: compute_loss is overridden. ``hf_trainer_num_items``: the Trainer
            calls a loss function, counts the labels, and multiplies by the number of processes.
        window: how much longer than K ``gradient_accumulation_steps`` is; the end of the epoch cuts the window to K.
    """
    from accelerate.state import AcceleratorState
    from transformers import Trainer, TrainerCallback, TrainingArguments

    AcceleratorState._reset_state(reset_partial_state=True)
    divides = backend == "hf_trainer"
    reducer = LossReducer(
        backend=backend, mesh=dist.group.WORLD, accumulation_steps=job.accumulation_steps if divides else None
    )

    class RolloutTrainer(Trainer):
        def get_train_dataloader(self) -> Any:
            return [{"micro_batch": m, "labels": m.labels} for m in job.micro_batches]  # what is this rank's already

    class OwnLossTrainer(RolloutTrainer):
        loss_is_scaled_for_ga = backend == "hf_trainer_scaled"

        def compute_loss(self, model: Any, inputs: Any, *_: Any, **__: Any) -> torch.Tensor:
            return tiny.loss(reducer, model(inputs["micro_batch"]), inputs["micro_batch"])

    class See(TrainerCallback):
        def on_pre_optimizer_step(self, *_: Any, **__: Any) -> None:
            job.saw()

    arguments = TrainingArguments(
        output_dir="unused",
        use_cpu=True,
        num_train_epochs=job.steps,
        gradient_accumulation_steps=job.accumulation_steps + window,
        max_grad_norm=0.0,
        lr_scheduler_type="constant",
        save_strategy="no",
        logging_strategy="no",
        report_to="none",
        disable_tqdm=True,
        remove_unused_columns=False,
        dataloader_pin_memory=False,
    )
    optimizer = tiny.adamw(job.model.parameters())
    shared = {"model": job.model, "args": arguments, "optimizers": (optimizer, None), "callbacks": [See]}
    if backend == "hf_trainer_num_items":
        following = iter(job.micro_batches * job.steps)  # the Trainer gives the function outputs and labels alone
        trainer = RolloutTrainer(
            **shared, compute_loss_func=lambda outputs, *_, **__: tiny.loss(reducer, outputs, next(following))
        )
    else:
        trainer = OwnLossTrainer(**shared)
    assert trainer.accelerator.num_processes == dist.get_world_size()
    trainer.train()


def megatron(job: Job, *, backend: str) -> None:
    """Megatron core: its schedule, its DistributedDataParallel, its finalize_model_grads."""
    with megatron_on_cpu(job.model.head.weight.dtype):
        from megatron.core import parallel_state
        from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
        from megatron.core.pipeline_parallel.schedules import forward_backward_no_pipelining
        from megatron.core.transformer import TransformerConfig

        megatron_groups(job.cp_size)
        config = TransformerConfig(
            num_layers=tiny.LAYERS,
            hidden_size=tiny.HIDDEN,
            num_attention_heads=tiny.HEADS,
            context_parallel_size=job.cp_size,
            calculate_per_token_loss=backend == "megatron_per_token",
        )
        model = DistributedDataParallel(config, DistributedDataParallelConfig(), MegatronModel(job.model))
        config.no_sync_func = model.no_sync
        config.finalize_model_grads_func = finalize_model_grads
        averaged = parallel_state.get_data_parallel_group(with_context_parallel=True)
        reducer = LossReducer(backend=backend, mesh=averaged)
        log: list[dict[str, torch.Tensor]] = []

        def forward_step(data: Iterator[MicroBatch[torch.Tensor]], model: Any) -> Any:
            micro_batch = next(data)

            def loss_function(outputs: tuple[torch.Tensor, ...]) -> tuple[Any, ...]:
                if backend == "megatron_per_token":
                    parts = [
                        reducer.loss_and_count(x, micro_batch, loss_aggregation=mode)
                        for x, mode in tiny.terms(outputs, micro_batch)
                    ]
                    loss, count = sum(loss for loss, _ in parts), parts[0][1]
                else:
                    loss, count = tiny.loss(reducer, outputs, micro_batch), torch.tensor(1)
                # Megatron divides in place what is returned: a view of it logs what it then is, a clone what it was.
                log.append({"view": loss.detach(), "clone": loss.detach().clone()})
                return (loss, {}) if backend == "megatron_legacy" else (loss, count, {})

            return model(micro_batch), loss_function

        optimizer = tiny.adamw(job.model.parameters())
        for _ in range(job.steps):
            model.zero_grad_buffer()
            with reducer.step():
                forward_backward_no_pipelining(
                    forward_step_func=forward_step,
                    data_iterator=iter(job.micro_batches),
                    model=model,
                    num_microbatches=len(job.micro_batches),
                    seq_length=1,
                    micro_batch_size=1,
                )
            for name in ("view", "clone"):
                job.logged.setdefault(name, sum(of[name].item() for of in log))
            for parameter in job.model.parameters():
                parameter.grad = parameter.main_grad
            job.saw()
            optimizer.step()
            optimizer.zero_grad()


class MegatronModel(torch.nn.Module):
    """What the schedule asks of a model beyond being one."""

    model_type = None

    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__()
        self.model = model

    def set_input_tensor(self, tensor: Any) -> None:
        pass

    def forward(self, *inputs: Any) -> Any:
        return self.model(*inputs)


@contextlib.contextmanager
def megatron_on_cpu(dtype: torch.dtype) -> Iterator[None]:
    """Megatron asks for CUDA by name; here it gets the CPU."""

    def on_cpu(make: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        def made(*arguments: Any, device: Any = None, **others: Any) -> torch.Tensor:
            return make(*arguments, device="cpu" if str(device).startswith("cuda") else device, **others)

        return made

    with contextlib.ExitStack() as patches:
        on_a_cpu = {"current_device": "cpu", "current_stream": None, "synchronize": None, "is_available": False}
        for name, value in on_a_cpu.items():
            patches.enter_context(mock.patch.object(torch.cuda, name, lambda *_, value=value, **__: value))
        for name in ("zeros", "ones", "empty", "full", "tensor", "zeros_like", "ones_like", "empty_like"):
            patches.enter_context(mock.patch.object(torch, name, on_cpu(getattr(torch, name))))
        # Per-token loss divides by an integer tensor, which gives the default dtype: float32 would round 1 / T.
        default = torch.get_default_dtype()
        torch.set_default_dtype(dtype)
        try:
            yield
        finally:
            torch.set_default_dtype(default)


def megatron_groups(cp_size: int) -> None:
    """Megatron's process groups, made anew where another cp_size is asked for."""
    from megatron.core import parallel_state

    if parallel_state.is_initialized():
        if parallel_state.get_context_parallel_world_size() == cp_size:
            return
        parallel_state.destroy_model_parallel()
    parallel_state.initialize_model_parallel(context_parallel_size=cp_size)


TRAINERS: dict[str, Callable[[Job], None]] = {
    "none": none,
    "ddp": partial(ddp, no_sync=False),
    "ddp_no_sync": partial(ddp, no_sync=True),
    "fsdp": fsdp,
    "fsdp_sum": partial(fsdp, sums=True),
    "hsdp": partial(fsdp, replicas=2),
    "accelerate": accelerate,
    "deepspeed_0": partial(deepspeed, stage=0),
    "deepspeed_1": partial(deepspeed, stage=1),
    "deepspeed_2": partial(deepspeed, stage=2),
    "hf_trainer": partial(hf_trainer, backend="hf_trainer"),
    "hf_trainer_window": partial(hf_trainer, backend="hf_trainer", window=3),
    "hf_trainer_scaled": partial(hf_trainer, backend="hf_trainer_scaled"),
    "hf_trainer_num_items": partial(hf_trainer, backend="hf_trainer_num_items"),
    "megatron": partial(megatron, backend="megatron"),
    "megatron_legacy": partial(megatron, backend="megatron_legacy"),
    "megatron_per_token": partial(megatron, backend="megatron_per_token"),
    "wrong": partial(ddp, no_sync=True, backend="none"),
}


@cache
def cp_group(dp_size: int, cp_size: int) -> dist.ProcessGroup | None:
    """The ranks that share sequences: neighbours, as in Megatron."""
    if cp_size == 1:
        return None
    groups = [dist.new_group([d * cp_size + c for c in range(cp_size)]) for d in range(dp_size)]
    return groups[dist.get_rank() // cp_size]
