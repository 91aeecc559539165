"""The baselines: a folder of tests and mutants each."""
