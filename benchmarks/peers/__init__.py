"""Other frameworks that train the same model, compared by benchmarks/sharding.py. One short program each."""
