"""The Triton kernels, without a GPU: interpreted they do what plain torch does, and they compile for GPUs."""

import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import rollpack
from rollpack.torch import LossReducer, reducer, token_weights, weighted_sum, weights

pytest.importorskip("triton")
HERE = Path(__file__).parent


def test_interpreted_they_pass_the_tests_of_the_reducer_and_agree_with_plain_torch():
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "test_reducer.py", "kernel_worker.py"],
        cwd=HERE,
        env={**os.environ, "TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert " passed" in done.stdout
    assert "skipped" not in done.stdout


@pytest.mark.parametrize("value", ["fp64", "fp32", "bf16", "fp16"])
def test_they_compile_for_gpus(monkeypatch, tmp_path, value):
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from rollpack.torch import _kernel

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    weight = "fp64" if value == "fp64" else "fp32"
    kernels = {
        _kernel._weigh: {"trained": "*u8", "segment_ids": "*i64", "of_samples": f"*{weight}", "out": f"*{weight}"},
        _kernel._add: {"values": f"*{value}", "weights": f"*{weight}", "sums": f"*{weight}"},
        _kernel._spread: {"grad": f"*{weight}", "weights": f"*{weight}", "out": f"*{value}"},
    }
    for kernel, tensors in kernels.items():
        sizes = {name: "i32" for name in kernel.arg_names if name not in tensors} | {"block": "constexpr"}
        source = ASTSource(kernel, tensors | sizes, {"block": _kernel._BLOCK})
        compiled = triton.compile(source, target=GPUTarget("cuda", 80, 32), options=_kernel._OPTIONS)
        assert compiled.asm["cubin"]


def test_where_they_cannot_run_plain_torch_does_and_says_so(monkeypatch):
    """Kernels for a CPU: Triton refuses."""
    values = torch.tensor([1.0, 2.0, 4.0])
    monkeypatch.setattr(torch.Tensor, "is_cuda", True)
    weights._kernel_of.cache_clear()
    with pytest.warns(UserWarning, match="plain torch reduces losses on cpu, as Triton cannot be used there"):
        assert weighted_sum(values, torch.tensor([1.0, 0.0, 0.5])).item() == 3.0
    assert weighted_sum(values, torch.tensor([1.0, 0.0, 0.5])).item() == 3.0  # said once
    weights._kernel_of.cache_clear()


def test_a_graph_that_is_captured_works_weights_out_itself(monkeypatch):
    """It is replayed after its micro-batch was written over: weights that were known would be those of an old one."""
    rows = [{"tokens": [1, 2, 3], "loss_mask": [1, 1]}]
    (micro_batch,) = (m.to("cpu") for m in rollpack.pack(rows, rollpack.plan(rows, micro_batch_size=1)))
    made = Counter()
    monkeypatch.setattr(weights, "_kernel", lambda *_: None)
    monkeypatch.setattr(reducer, "token_weights", lambda *args: made.update(["weights"]) or token_weights(*args))
    monkeypatch.setattr(torch.Tensor, "is_cuda", True)
    reduce, values = LossReducer(), torch.ones(3)
    for capturing, total in [(False, 1), (False, 1), (True, 2), (True, 3), (False, 3)]:
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda capturing=capturing: capturing)
        assert reduce(values, micro_batch).item() == 1.0
        assert made["weights"] == total


def test_what_only_stands_for_a_tensor_on_a_gpu_is_left_to_torch():
    with FakeTensorMode():
        mask = torch.ones(3, dtype=torch.bool, device="cuda")
        try:
            _ = ~mask
        except RuntimeError as error:
            pytest.skip(f"this torch, as 2.6 does, asks for a driver to invert what only stands for a mask: {error}")
        values = torch.ones(3, device="cuda", dtype=torch.bfloat16, requires_grad=True)
        of_tokens = token_weights(mask, *torch.zeros(2, 3, device="cuda").long())
        total = weighted_sum(values, of_tokens.float())
    assert (total.device.type, total.dtype, total.requires_grad) == ("cuda", torch.float32, True)
