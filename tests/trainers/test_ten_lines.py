"""The documented lines for Accelerate and FSDP2, by torchrun: two processes come to the weights of one."""

import os
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

ROOT = Path(__file__).parents[2]
PAGES = (ROOT / "README.md").read_text() + (ROOT / "python" / "docs" / "trainers.md").read_text()
BLOCKS = re.findall(r"^```python\n(.*?)^```$", PAGES, flags=re.MULTILINE | re.DOTALL)

BEFORE = """
import os
import sys
import torch
import rollpack
from rollpack.torch import LossReducer, micro_batches, token_logprobs

torch.set_default_dtype(torch.float64)
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Embedding(16, 8), torch.nn.Linear(8, 16))
"""
AFTER = """
weights = [w.full_tensor() if hasattr(w, "full_tensor") else w for w in model.parameters()]
if os.environ["RANK"] == "0":
    torch.save({"weights": [w.detach() for w in weights], "ranks": plan.settings.dp_size}, sys.argv[1] + "/NAME.pt")
torch.manual_seed(0)
"""
# A process of torch that ends right after a gather may abort: gloo's thread lets go of a tensor while Python ends.
END = """
torch.distributed.barrier()
torch.distributed.destroy_process_group()
"""


def lines(name):
    (text,) = [block for block in BLOCKS if name in block]
    return text + AFTER.replace("NAME", name)


@pytest.fixture(scope="module")
def weights(tmp_path_factory):
    """By number of processes, what each block left of its model after its step."""
    folder = tmp_path_factory.mktemp("lines")
    table = {
        "tokens": [[7, 1], [7, 1, 2, 3], [8, 1, 2], [8, 1, 2, 3, 4]],
        "loss_mask": [[1], [1, 1, 1], [1, 1], [1, 0, 1, 1]],
        "rollout_id": [0, 1, 2, 3],
        "group_index": [0, 0, 1, 1],
    }
    pq.write_table(pa.table(table), folder / "rollouts.parquet")
    script = folder / "lines.py"
    script.write_text(BEFORE + lines("Accelerator") + lines("fully_shard") + END)
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "ACCELERATE_USE_CPU": "true"}
    if sys.platform == "linux":
        environment.setdefault("GLOO_SOCKET_IFNAME", "lo")
    found = {}
    for processes in (1, 2):
        results = folder / str(processes)
        results.mkdir()
        launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes)]
        done = subprocess.run(
            [*launch, script, results], cwd=folder, env=environment, capture_output=True, text=True, timeout=400, check=False
        )
        assert done.returncode == 0, done.stderr[-6000:]
        found[processes] = {path.stem: torch.load(path) for path in results.glob("*.pt")}
    return found


@pytest.mark.skipif(find_spec("accelerate") is None, reason="accelerate is not installed")
@pytest.mark.parametrize("name", ["Accelerator", "fully_shard"])
def test_two_processes_come_to_the_weights_of_one(name, weights):
    one, two = weights[1][name], weights[2][name]
    assert (one["ranks"], two["ranks"]) == (1, 2)
    torch.manual_seed(0)
    start = torch.nn.Embedding(16, 8, dtype=torch.float64).weight
    assert (one["weights"][0] - start).abs().max() > 5e-4  # AdamW moved it
    for a, b in zip(one["weights"], two["weights"], strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-12)
