"""VATP: its tests and mutants."""
