"""The reference methods as caches for Hugging Face transformers: arguments of `model.generate`.

Importing this package requires transformers (the extra `kvtwin[hf]`) and registers the attention function "kvtwin" with
it; see `cache_adapter`.
"""

from importlib import import_module
from pkgutil import iter_modules
from typing import Any

from . import block_caches
from . import cache_adapter as cache_adapter  # registers the attention function, needs the extra


def __getattr__(name: str) -> Any:
    """NAMECache: from the module of this folder with its name, or derived from a State that takes blocks."""
    for found in iter_modules(__path__):
        if f"{found.name.replace('_', '')}cache" == name.lower():
            return getattr(import_module(f"{__name__}.{found.name}"), name)
    derived = block_caches.find(name, __name__.removesuffix(".hf"), __name__)
    if derived is not None:
        globals()[name] = derived  # the same class each time
        return derived
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
