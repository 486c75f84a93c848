"""Phalanx: plan, predict, rehearse, launch, train and keep alive N-D parallel language-model training."""

__version__ = "0.1.0"
