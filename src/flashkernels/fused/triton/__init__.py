"""The Triton kernels of the row-wise ops."""
