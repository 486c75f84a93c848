"""Phalanx: plan, predict, rehearse, launch, train and keep alive N-D parallel language-model training.

The functions for programs (docs/reference/api.md) are those of phalanx.api, imported when they are first used.
"""

import importlib

__version__ = "0.1.0"


def __getattr__(name: str) -> object:
    """Returns a function of the API."""
    if not name.startswith("_"):
        api = importlib.import_module("phalanx.api")
        if name in api.__all__:
            return getattr(api, name)
    raise AttributeError(f"module 'phalanx' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *importlib.import_module("phalanx.api").__all__})
