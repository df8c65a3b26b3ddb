"""Attention over a paged cache: decoding, its split over the context, and paged prefill."""
