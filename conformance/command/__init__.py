"""KV-cache compression methods, each implemented twice, and a judge of these implementations and of yours.

kvtwin.reference      eager PyTorch, as the papers define the methods; kvtwin.reference.hf has caches for transformers
kvtwin.optimized      the same names as Triton kernels; kvtwin.optimized.hf has the same caches
kvtwin.conformance    the suite, whose `api` judges implementations in tests of your own

On the command line, `kvtwin verify METHOD --impl MODULE` judges your implementation of a method.
"""

import sys
from typing import Any


def __getattr__(name: str) -> Any:
    if name == "__version__":
        from importlib.metadata import version

        return version("kvtwin")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def _register() -> None:
    """Register the attention "kvtwin" with transformers, if that has been imported: `set_attn_implementation` then
    accepts the name before a cache of kvtwin is imported. `reference.hf`, which takes long to import, replaces these
    functions."""

    def attention(*args: Any, **options: Any) -> Any:
        from .reference.hf.cache_adapter import attention as ours

        return ours(*args, **options)

    def mask(*args: Any, **options: Any) -> Any:
        from .reference.hf.masks import make_mask as ours

        return ours(*args, **options)

    for module, name, function in (
        ("modeling_utils", "AttentionInterface", attention), ("masking_utils", "AttentionMaskInterface", mask),
    ):
        interface = getattr(sys.modules.get(f"transformers.{module}"), name, None)
        if interface is not None:
            interface.register("kvtwin", function)


_register()
