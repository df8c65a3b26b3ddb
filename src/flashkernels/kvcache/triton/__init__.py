"""The Triton kernels of the cache."""
