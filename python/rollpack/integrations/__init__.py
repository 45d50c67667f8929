"""Adapters for trainers, one module each. None imports its trainer before it is used."""
