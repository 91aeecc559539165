"""Eager PyTorch implementation of each method, as its paper defines it. Run in float64, it is the oracle."""
