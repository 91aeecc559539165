"""The cache adapter of methods whose layers share budgets by a cascade. It has no mathematics; both sides share it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor
from transformers import PreTrainedConfig

from ..contract import MethodConfig
from .cache_adapter import StateCache
from .cache_adapter_layer import StateLayer


class Cascading:
    """Makes the states of a model's layers, and the cascade that they share, with the first state of a batch."""

    def __init__(self, state_class: type[Any], cascade_class: type[Any]) -> None:
        self.layers = 0                     # of those that evict
        self.cascade: Any = None
        self._state_class, self._cascade_class = state_class, cascade_class

    def make_state(self, layer: int, config: MethodConfig, **sizes: Any) -> Any:
        """The state of the layer-th layer that evicts. ValueError if its batch or device is not that of layer 0."""
        if layer == 0:
            shared = {name: sizes[name] for name in ("batch", "device")}
            self.cascade = self._cascade_class(config, layers=self.layers, **shared)
        return self._state_class(config, cascade=self.cascade, layer=layer, **sizes)


@dataclass(frozen=True)
class OfLayer:
    """What makes the states of the number-th layer that evicts."""

    cascading: Cascading
    number: int

    def __call__(self, config: MethodConfig, **sizes: Any) -> Any:
        return self.cascading.make_state(self.number, config, **sizes)


class CascadingCache(StateCache):
    """Base class of caches whose layers share a cascade. A method's cache sets Config, State and Cascade."""

    Cascade: ClassVar[type[Any]]

    def __init__(self, config: PreTrainedConfig, **options: Any) -> None:
        self._cascading = Cascading(self.State, self.Cascade)
        super().__init__(config, **options)

    @property
    def cascade(self) -> Any:
        """What the layers share, None before the first tokens."""
        return self._cascading.cascade

    def _no_rollback(self) -> str | None:
        return f"the layers of a {type(self).__name__} have their budgets when the last one has the prompt, and " \
            "transformers passes candidates with it"

    def _layer(self, number: int, mask: Tensor | None) -> StateLayer:
        self._cascading.layers += 1
        made = OfLayer(self._cascading, self._cascading.layers - 1)
        return StateLayer(self.config, made, mask)  # type: ignore[arg-type]

    def reset(self) -> None:
        """Forget every token."""
        super().reset()
        if self.cascade is not None:
            self.cascade.reset()

    @property
    def _shared(self) -> Any:
        return self.cascade

    @property
    def _makers(self) -> tuple[object, ...]:
        return (self._cascading,)
