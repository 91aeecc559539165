"""TOVA: its tests and mutants."""
