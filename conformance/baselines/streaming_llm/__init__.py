"""StreamingLLM: its tests and mutants."""
