"""The block cache that KeyDiff and the baselines share: its state, its operations, its kernels."""
