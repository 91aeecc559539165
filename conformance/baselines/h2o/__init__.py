"""H2O: its tests and mutants."""
