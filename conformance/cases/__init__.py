"""The inputs of tests: Hypothesis strategies, contents, memory layouts, tiny models."""
