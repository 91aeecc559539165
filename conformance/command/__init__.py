"""KV-cache compression methods, each implemented twice, and a judge of these implementations and of yours.

kvtwin.reference      eager PyTorch, as the papers define the methods; kvtwin.reference.hf has caches for transformers
kvtwin.optimized      the same names as Triton kernels; kvtwin.optimized.hf has the same caches
kvtwin.conformance    the suite, whose `api` judges implementations in tests of your own

On the command line, `kvtwin verify METHOD --impl MODULE` judges your implementation of a method.
"""

import sys
from importlib import import_module
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

    def function(where: str, name: str) -> Any:
        def call(*args: Any, **options: Any) -> Any:
            return getattr(import_module(f"kvtwin.reference.hf.{where}"), name)(*args, **options)

        return call

    for module, name, ours in (
        ("modeling_utils", "AttentionInterface", function("cache_adapter", "attention")),
        ("masking_utils", "AttentionMaskInterface", function("masks", "make_mask")),
    ):
        interface = getattr(sys.modules.get(f"transformers.{module}"), name, None)
        if interface is not None:
            interface.register("kvtwin", ours)


_register()
