"""Random eviction: its tests and mutants."""
