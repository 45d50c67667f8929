"""An environment for each trainer: its own packages, and behind them those that the tests run with (torch, rollpack).

They lie in ``.venv-trainers``, and are made once for each list of packages.
"""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
HOME = HERE.parents[1] / ".venv-trainers"

#: ray, and what importing it takes.
_RAY = [
    "ray==2.60.0",
    "protobuf",
    "msgpack",
    "click",
    "jsonschema",
    "jsonschema-specifications",
    "referencing",
    "rpds-py",
    "attrs",
    "requests",
    "urllib3",
    "charset-normalizer",
    "idna",
    "certifi",
]

#: Name → what is installed, without what that depends on: what the modules under test import, and no more.
PACKAGES = {
    "trl": ["trl==1.16.0"],
    "verl": [
        "verl==0.9.1",
        "tensordict==0.10.0",
        "pyvers",
        "cloudpickle",
        "orjson",
        "importlib-metadata",
        "zipp",
        *_RAY,
        "codetiming",
        "hydra-core",
        "omegaconf",
        "antlr4-python3-runtime==4.9.3",
        "torchdata",
        "peft",
        "pillow",
    ],
    "skyrl": [
        "skyrl==0.3.0",
        *_RAY,
        "loguru",
        "jaxtyping",
        "wadler-lindig",
        "omegaconf",
        "antlr4-python3-runtime==4.9.3",
    ],
    "tinker": [
        "tinker==0.38.0",
        "anyio",
        "click",
        "distro",
        "httpx",
        "httpcore",
        "h11",
        "h2",
        "hpack",
        "hyperframe",
        "idna",
        "certifi",
        "orjson",
        "protobuf",
        "pydantic",
        "pydantic-core",
        "annotated-types",
        "typing-inspection",
        "pyqwest",
        "rich",
        "markdown-it-py",
        "mdurl",
        "pygments",
        "sniffio",
        "typing-extensions",
        "zstandard",
    ],
    "torchtitan": [
        "torchtitan==0.3.0",
        "spmd_types==0.2.3",
        "torch_checkpointing==0.1.1",
        "tyro==1.0.17",
        "docstring-parser==0.18.0",
        "typeguard==4.6.1",
    ],
    "openrlhf": ["openrlhf==0.11.2"],
    "areal": ["areal==1.0.4"],
}


def python_of(name):
    """The interpreter of a trainer's environment; skips the test where it cannot be made."""
    uv = shutil.which("uv", path=os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")]))
    if uv is None:
        pytest.skip("uv makes the environments of trainers, and is not here")
    home, marker = HOME / name, HOME / name / "packages.txt"
    python = home / "bin" / "python"
    wanted = "\n".join([sys.executable, *PACKAGES[name]])
    if not (marker.exists() and marker.read_text() == wanted):
        shutil.rmtree(home, ignore_errors=True)
        _run([uv, "venv", "--quiet", "--python", sys.executable, str(home)], name)
        _run([uv, "pip", "install", "--quiet", "--no-deps", "--python", str(python), *PACKAGES[name]], name)
        (site,) = home.glob("lib/python*/site-packages")
        ours = [path for path in sys.path if path.endswith("site-packages")]
        # Behind its own: lines of a .pth file that begin with import are run.
        (site / "tests.pth").write_text("".join(f"import site; site.addsitedir({path!r})\n" for path in ours))
        marker.write_text(wanted)
    return python


def _run(command, name):
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=400)
    if done.returncode != 0:
        pytest.skip(f"the environment of {name} cannot be made: {done.stderr.strip()[-500:]}")


def run(name, *arguments, cwd=None):
    """Run a trainer's Python with these arguments, and return what it printed."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "HF_HUB_OFFLINE": "1"}
    environment.pop("PYTHONPATH", None)
    done = subprocess.run(
        [str(python_of(name)), *map(str, arguments)],
        env=environment,
        cwd=cwd,
        capture_output=True,
        text=True,
        check=False,
        timeout=900,
    )
    assert done.returncode == 0, done.stderr[-8000:] + done.stdout[-8000:]
    return done.stdout
