"""Compiling and launching kernels."""
