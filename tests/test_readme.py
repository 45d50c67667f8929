"""The two set-up commands of the README are what CI itself calls. (All other code of it runs in test_docs.py.)"""

import re
from pathlib import Path

ROOT = Path(__file__).parents[1]


def test_set_up_commands_are_those_that_ci_calls():
    """CI takes them from the README by this pattern; the first runs the main job, the second the tests."""
    blocks = re.findall(r"^```bash\n(.*?)^```$", (ROOT / "README.md").read_text(), flags=re.MULTILINE | re.DOTALL)
    first, second = [text for text in blocks if ".venv/bin/pip" in text]
    assert first.rstrip().endswith(".venv/bin/rollpack demo")
    assert second.rstrip().endswith(".venv/bin/python -m pytest")
    assert ".venv/bin/pip" in (ROOT / ".ci" / "run").read_text()


def test_every_public_name_has_a_docstring():
    import rollpack
    import rollpack.torch

    for module in (rollpack, rollpack.torch):
        for name in module.__all__:
            assert (getattr(module, name).__doc__ or "").strip(), name
