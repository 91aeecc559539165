"""Eager PyTorch implementation of each method, as its paper defines it. Run in float64, it is the oracle."""

import sys
from typing import Any


def _register() -> None:
    """Register hf's attention "kvtwin" with transformers, if that has been imported: `set_attn_implementation` then
    accepts the name before a cache of kvtwin is imported. `hf`, which takes long to import, replaces these functions.
    """

    def attention(*args: Any, **options: Any) -> Any:
        from .hf.cache_adapter import attention as ours

        return ours(*args, **options)

    def mask(*args: Any, **options: Any) -> Any:
        from .hf.masks import make_mask as ours

        return ours(*args, **options)

    for module, name, function in (
        ("modeling_utils", "AttentionInterface", attention), ("masking_utils", "AttentionMaskInterface", mask),
    ):
        interface = getattr(sys.modules.get(f"transformers.{module}"), name, None)
        if interface is not None:
            interface.register("kvtwin", function)


_register()
