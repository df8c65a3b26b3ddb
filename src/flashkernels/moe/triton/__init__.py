"""The `triton` implementation of the mixture of experts."""
