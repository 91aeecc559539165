"""ThinKV: its tests, claims and mutants."""
