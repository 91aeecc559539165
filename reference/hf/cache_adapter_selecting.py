"""The cache adapter of methods whose first layers attend to all tokens. It has no mathematics; both sides share it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, ClassVar

from transformers import PreTrainedConfig

from ..contract.arguments import check_integer
from .cache_adapter import StateCache


class SelectingCache(StateCache):
    """Base class of caches that evict nothing and select anew at each step, except in the first `skip_layers` layers,
    which attend to all tokens. A method's cache sets Config, which has max_tokens, and State. See `StateCache`."""

    Config: ClassVar[Any]

    def __init__(self, config: PreTrainedConfig, *, skip_layers: int = 2, **options: Any) -> None:
        self.skip_layers = check_integer("skip_layers", skip_layers, minimum=0)
        super().__init__(config, **options)

    def _config_of(self, number: int) -> Any:
        config: Any = self.config
        if number < self.skip_layers:
            config = replace(config, budget=config.max_tokens)
        return config
