"""What the kernels of several methods share."""
