"""ThinKV's cache adapter: the sparsity of several layers determines the thought type (section 3.1.3).

Each layer has its own State, as in `cache_adapter`, but without edges, so no State classifies its own sparsity. In the
forward pass that begins a segment, each layer passes its State to a `Window`. After the last layer, the sparsities of
the layers L* are classified, and all States get the thought types of the rows. Both sides share this module, which
contains no mathematics: each side has its own `classify`.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Any

from torch import Tensor
from transformers import PreTrainedConfig

from ..contract.arguments import check_integer
from ..contract.thinkv.arguments import check_edges
from ..contract.thinkv.config import ThinKVConfig
from ..contract.thinkv.types import Thresholds
from .cache_adapter import StateCache
from .cache_adapter_layer import StateLayer
from .masks import MaskSpec
from .options import FROM_MODEL
from .progress import one_token_per_pass


class Window:
    """Collects the States of all layers that evict, in a forward pass that begins a segment.

    It holds States from the first layer of such a pass to the last, and none at other times.
    """

    def __init__(
        self, thresholds: Thresholds, classify: Callable[[Sequence[Tensor], tuple[float, float]], Tensor]
    ) -> None:
        self._thresholds, self._classify = thresholds, classify
        self.layers: set[int] = set()               # the layers that evict
        self._states: dict[int, Any] = {}

    def enter(self, layer: int, state: Any) -> None:
        """Add a layer's State after the first step of a segment. After the last layer, assign the thought types to all.
        """
        self._states[layer] = state
        if self._states.keys() < self.layers:
            return
        states, self._states = self._states, {}
        sparsity = [states[number].sparsity for number in self._thresholds.layers]
        on_one_device = [one.to(sparsity[0].device) for one in sparsity]
        thought = self._classify(on_one_device, self._thresholds.edges)                      # [B]
        for state in states.values():
            state.thought.copy_(thought)

    def clear(self) -> None:
        """Forget the current forward pass."""
        self._states = {}


class ThoughtLayer(StateLayer):
    """The cache of layer `number`, which adds its State to `window` when a segment begins."""

    def __init__(
        self, config: ThinKVConfig, state_class: type[Any], attention_mask: Tensor | None, number: int,
        window: Window | None,
    ) -> None:
        super().__init__(config, state_class, attention_mask)
        self._number, self._window, self._tau = number, window, config.tau
        self._prompt = 0                            # its number of tokens, padding included

    def _in_steps(
        self, query: Tensor, key: Tensor, value: Tensor, spec: MaskSpec, occupied: Tensor | None, seen: int
    ) -> Tensor:
        """Pass the first tokens to `prefill`, later ones to `step`. NotImplementedError for several later tokens."""
        count = key.shape[2]
        if seen == 0:
            self._prompt = count
        elif count > 1:
            raise one_token_per_pass("ThinKV", count, seen)
        output = super()._in_steps(query, key, value, spec, occupied, seen)
        if self._window is not None and seen and self._begins(seen):
            self._window.enter(self._number, self.state)
        return output

    def _begins(self, seen: int) -> bool:
        """Whether the token after `seen` tokens begins a segment."""
        return (seen - self._prompt) % self._tau == 0

    def phase(self, seen: int) -> Hashable:
        phase = super().phase(seen)
        return phase if phase is None or self._window is None else self._begins(seen)

    def reset(self) -> None:
        super().reset()
        if self._window is not None:
            self._window.clear()


class ThoughtCache(StateCache):
    """Base class of ThinKV's caches. Each side sets State and classify. See `StateCache`."""

    Config = ThinKVConfig
    refused = (*FROM_MODEL, "edges")

    def __init__(
        self, config: PreTrainedConfig, *, budget: int | None = None, compression_ratio: float | None = None,
        thresholds: Thresholds | None = None, **options: Any,
    ) -> None:
        if budget is None and compression_ratio is None:
            budget = ThinKVConfig.budget
        if "edges" in options:
            raise TypeError(
                "edges is not an option here: thresholds=Thresholds(layers, edges) also has their layers"
            )
        self.thresholds = None if thresholds is None else check_thresholds(thresholds)
        self._window = None if self.thresholds is None else Window(self.thresholds, self.classify)
        super().__init__(config, budget=budget, compression_ratio=compression_ratio, **options)
        for name in ("tau", "group"):
            if getattr(self.config, name) < 2:
                raise ValueError(
                    f"{name} must be at least 2 here, got {getattr(self.config, name)}: the first token of a segment "
                    "must stay in the buffer until the last layer has attended"
                )
        if self._window is not None and self.thresholds is not None:
            self._window.layers = {n for n, layer in enumerate(self.layers) if isinstance(layer, ThoughtLayer)}
            check_layers(self.thresholds.layers, self._window.layers, len(self.layers))

    @staticmethod
    def classify(sparsity: Sequence[Tensor], edges: tuple[float, float]) -> Tensor:
        """The thought types [B] int64 for the sparsities [B] of several layers."""
        raise NotImplementedError

    def _no_rollback(self) -> str | None:
        shared = "ThinKV's thresholds decide for all layers at once, after a forward pass of one token"
        return super()._no_rollback() if self._window is None else shared

    def _layer(self, number: int, mask: Tensor | None) -> StateLayer:
        assert isinstance(self.config, ThinKVConfig)
        return ThoughtLayer(self.config, self.State, mask, number, self._window)


def check_thresholds(value: object) -> Thresholds:
    """Return Thresholds with at least one layer, no layer twice, and ascending edges."""
    if not isinstance(value, tuple) or len(value) != len(Thresholds._fields):
        raise TypeError(f"thresholds must be Thresholds(layers, edges) or None, got {value!r}")
    layers, edges = value
    if not isinstance(layers, (tuple, list)) or not layers:
        raise TypeError(f"thresholds.layers must be a tuple of layer numbers, got {layers!r}")
    for place, number in enumerate(layers):
        check_integer(f"thresholds.layers[{place}]", number, minimum=0)
    if len(set(layers)) < len(layers):
        raise ValueError(f"thresholds.layers must name no layer twice, got {tuple(layers)}")
    return Thresholds(tuple(layers), check_edges(edges))


def check_layers(layers: Sequence[int], evicting: set[int], count: int) -> None:
    """ValueError unless all of `layers` are among the `evicting` layers of a model of `count` layers."""
    for number in layers:
        if number not in evicting:
            what = "has no full attention, so its cache does not evict" if number < count else "does not exist"
            raise ValueError(
                f"thresholds.layers must be layers of the model that evict, {sorted(evicting)} of {count}, got "
                f"{tuple(layers)}: layer {number} {what}"
            )
