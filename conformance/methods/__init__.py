"""Tests of our own kernels and caches that the suite cannot express, and their mutants. Not in the wheel."""
