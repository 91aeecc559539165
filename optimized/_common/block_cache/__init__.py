"""The block cache shared by KeyDiff and the baselines: its state, operations and kernels."""
