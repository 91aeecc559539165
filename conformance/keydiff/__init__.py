"""KeyDiff: its tests, claims and mutants."""
