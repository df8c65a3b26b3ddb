"""Attention: `api` is the public face, `problem` the work in numbers, `reference`, `sdpa` and `triton` compute it."""
