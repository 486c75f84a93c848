"""Other systems that train the same model: what benchmarks/sharding.py compares with. One short program each."""
