"""SnapKV: its tests and mutants."""
