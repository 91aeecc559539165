"""Code that several methods' kernels share."""
