"""Checks that run on a GPU and take long: compute-sanitizer on every kernel, and states over many steps."""
