"""The cache adapter of methods that quantize tokens and evict none. It contains no mathematics; both sides share it."""

from __future__ import annotations

from typing import Any, ClassVar

from torch import Tensor
from transformers import PreTrainedConfig

from .cache_adapter import StateCache


class QuantizedCache(StateCache):
    """Base class of caches without a budget. A method's cache sets Config and State. See `StateCache`."""

    Config: ClassVar[Any]

    def __init__(
        self, config: PreTrainedConfig, *, attention_mask: Tensor | None = None, **options: Any
    ) -> None:
        if "budget" in options:
            raise TypeError("budget is not an option here: the cache evicts no token")
        super().__init__(config, budget=0, attention_mask=attention_mask, **options)

    def _method_config(self, budget: int, options: dict[str, Any]) -> Any:
        """The method's config, which has no budget."""
        return self.Config(**options)
