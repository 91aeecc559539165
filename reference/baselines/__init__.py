"""Eager PyTorch implementations of the methods that the papers compare with, one per file."""
