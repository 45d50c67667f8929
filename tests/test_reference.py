"""The API reference can be written: every public name is described, with the arguments that it takes."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
import reference


@pytest.mark.filterwarnings("ignore")  # ray's own
def test_the_reference_is_written_without_a_fault(tmp_path, capsys):
    assert reference.main(tmp_path) == 0, capsys.readouterr().err
    assert "dp_size" in (tmp_path / "rollpack" / "plan.md").read_text()
    assert "(rollpack/plan.md)" in (tmp_path / "index.md").read_text()


def test_faults_of_a_docstring_are_found():
    def wrong(some, other):
        """Adds.

        Args:
            some: a number.
            third: there is none. See :func:`rollpack.nowhere`.
        """

    told = "\n".join(reference.faults("wrong", wrong, reference))
    assert "describes third, and takes no such argument" in told
    assert "does not describe other" in told
    assert "refers to rollpack.nowhere" in told
