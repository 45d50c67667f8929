"""Programs to run and to read: ``python -m rollpack.examples.grpo`` (extra: ``examples``)."""
