"""Benchmarks of the optimized side, which `tox -e perf` runs on a CUDA device. Not part of the wheel. See NOTES.md."""
