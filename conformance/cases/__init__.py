"""The inputs of tests: Hypothesis strategies, contents, memory layouts, and the float64 oracle of a case."""
