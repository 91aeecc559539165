"""The cache adapter of methods whose first layers attend to all tokens. It has no mathematics; both sides share it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, ClassVar

from torch import Tensor
from transformers import PreTrainedConfig

from ..contract.arguments import check_integer
from .cache_adapter import StateCache, StateLayer


class SelectingCache(StateCache):
    """Base class of caches that evict nothing and select anew at each step, except in the first `skip_layers` layers,
    which attend to all tokens. A method's cache sets Config, which has max_tokens, and State. See `StateCache`."""

    Config: ClassVar[Any]

    def __init__(
        self, config: PreTrainedConfig, *, budget: int, skip_layers: int = 2, attention_mask: Tensor | None = None,
        **options: Any,
    ) -> None:
        self.skip_layers = check_integer("skip_layers", skip_layers, minimum=0)
        super().__init__(config, budget=budget, attention_mask=attention_mask, **options)

    def _layer(self, number: int, mask: Tensor | None) -> StateLayer:
        config: Any = self.config
        if number < self.skip_layers:
            config = replace(config, budget=config.max_tokens)
        return StateLayer(config, self.State, mask)
