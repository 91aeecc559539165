"""The laboratory: mutation, soak, other hosts, compilation, sanitizers, the authors' own code. Not in the wheel."""
