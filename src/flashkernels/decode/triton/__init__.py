"""The Triton implementation: `decode.py` reads the cache, `combine.py` joins what its programs leave behind."""
