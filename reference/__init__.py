"""Eager PyTorch references: each method as its paper writes it, dtype-generic, so that float64 makes it the oracle."""
