"""The optimized methods as caches for Hugging Face transformers: arguments of `model.generate`.

Importing this package requires transformers (the extra `kvtwin[hf]`) and registers the attention function "kvtwin" with
it. The reference's caches use the same function, so a process can use both. `captured` makes decode steps fast.
"""

from typing import Any

from ...reference.hf import block_caches
from ...reference.hf import cache_adapter as cache_adapter  # registers the attention function, needs the extra
from ._captured import captured as captured


def cache(method: str, model: Any, **options: Any) -> cache_adapter.StateCache:
    """The cache of a method by name, such as `cache("h2o", model, budget=1024)`. ValueError for an unknown name; other
    arguments and errors: the class that the page of the method names."""
    return block_caches.by_name(__name__, method, model, options)


def __getattr__(name: str) -> Any:
    """NAMECache, made or imported at the first use."""
    if name == "__all__":
        return ["cache", "captured", *block_caches.names().values()]
    return block_caches.attribute(__name__, __path__, globals(), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *block_caches.names().values()})
