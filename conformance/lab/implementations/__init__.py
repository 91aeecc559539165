"""Small implementations of kvtwin's methods, right and wrong, for tests of the verdict.

Each wrong one has one ill that real kernels have had, and the verdict must name it. None of them uses kvtwin's
optimized side, and the functions do not use the reference.
"""
