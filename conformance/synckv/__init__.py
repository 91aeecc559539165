"""SyncKV: its tests, claims and mutants."""
