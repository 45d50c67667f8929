"""Benchmarks, each run as a module: ``python -m tests.benchmarks.pipeline``."""
