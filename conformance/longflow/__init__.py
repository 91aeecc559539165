"""LongFlow: its tests, claims and mutants."""
