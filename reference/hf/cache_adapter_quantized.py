"""The cache adapter of methods that quantize tokens and evict none. It contains no mathematics; both sides share it."""

from __future__ import annotations

import warnings
from dataclasses import replace
from typing import Any, ClassVar

from transformers import PreTrainedConfig

from .cache_adapter import StateCache


class QuantizedCache(StateCache):
    """Base class of caches without a budget of tokens. A method's cache sets Config and State, and by_layer, the
    options that may be lists with a value for each layer of the model. `config` is that of the first layer. See
    `StateCache`."""

    Config: ClassVar[Any]
    by_layer: ClassVar[tuple[str, ...]] = ()

    def __init__(
        self, config: PreTrainedConfig, *, budget: int | None = None, compression_ratio: float | None = None,
        **options: Any,
    ) -> None:
        if compression_ratio is not None:
            raise TypeError(
                f"compression_ratio is not an option of {type(self).__name__}, which evicts no token: its bits say how "
                "much it compresses"
            )
        if budget is not None:
            warnings.warn(
                f"{type(self).__name__} evicts no token, so budget={budget!r} has no effect: its bits say how much it "
                "compresses", stacklevel=3,
            )
        self._lists = {
            name: tuple(options[name]) for name in self.by_layer if isinstance(options.get(name), (list, tuple))
        }
        if self._lists and isinstance(config, PreTrainedConfig):
            layers = config.get_text_config(decoder=True).num_hidden_layers
            for name, values in self._lists.items():
                if len(values) != layers:
                    raise ValueError(f"{name} needs one number per layer: expected {layers}, got {len(values)}")
        super().__init__(config, budget=1, **options)

    def _method_config(self, budget: int, options: dict[str, Any]) -> Any:
        """The method's config, which has no budget of tokens, in the first layer."""
        return self.Config(**options | {name: values[0] for name, values in self._lists.items()})

    def _config_of(self, number: int) -> Any:
        return replace(self.config, **{name: values[number] for name, values in self._lists.items()})
