"""Known models, a file per family: every shape with its source. `config/presets.py` puts them in one table."""
