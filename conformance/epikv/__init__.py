"""EpiKV: its tests, claims and mutants."""
