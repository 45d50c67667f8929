"""The examples in docstrings say what is so."""

import doctest
import importlib
import pkgutil

import pytest

import rollpack

#: These need libraries that are not always here, and have no examples.
LEFT_OUT = ("rollpack.integrations.", "rollpack.ray", "rollpack.examples.", "rollpack.torch._kernel", "rollpack.__main__")
MODULES = [name for _, name, _ in pkgutil.walk_packages(rollpack.__path__, "rollpack.") if not name.startswith(LEFT_OUT)]


@pytest.mark.parametrize("name", MODULES)
def test_examples(name):
    failed, _ = doctest.testmod(importlib.import_module(name))
    assert failed == 0  # what differs is on stdout


def test_there_are_examples():
    tried = {name: doctest.testmod(importlib.import_module(name)).attempted for name in MODULES}
    assert tried["rollpack.weights"] >= 1
    assert tried["rollpack.torch.weights"] >= 2
