"""What several of the data tests share."""

from pathlib import Path

import pytest

TRACES = Path(__file__).parents[3] / "shared" / "data"


@pytest.fixture
def traces():
    """A function from the name of a file of real rollout traces to its path."""

    def find(name):
        path = TRACES / f"{name}.parquet"
        if not path.exists():
            pytest.skip(f"{path} is not here")
        return path

    return find
