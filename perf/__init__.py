"""Benchmarks of the optimized side, run by `tox -e perf` on a CUDA device; not part of the wheel. See NOTES.md."""
