"""Row-wise ops between the big kernels, at memory speed: one file each, with their Triton kernels in `triton/`."""
