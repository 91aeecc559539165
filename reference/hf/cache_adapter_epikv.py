"""EpiKV's cache adapter: scores come from hidden states of two bands of layers and hold for all layers.

Hooks read the outputs of the layers in the bands: as the input of the next layer, or with a forward hook on the model's
last layer. One scorer serves the model, and the State of each layer has only keys and values, in the slots that the
scorer assigns. A forward pass ends when all layers that evict have attended and all hooks have run. Then one step of
the scorer scores the new token and selects the next slot. Only the last hidden state of each layer in the bands is
stored after the pass, in the scorer. Both sides share this module, which contains no mathematics.
"""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable, Hashable
from dataclasses import replace
from typing import Any, ClassVar

import torch
from torch import Tensor
from transformers import PreTrainedModel

from ..contract import MethodConfig
from ..contract.arguments import check_choice, check_integer
from ..contract.epikv.config import BANDS, POLICIES, EpiKVConfig, band_layers
from ..contract.interruption import note_change
from .cache_adapter import StateCache, in_autocast
from .cache_adapter_layer import StateLayer
from .masks import MaskSpec
from .options import FROM_MODEL
from .progress import one_token_per_pass

Bands = tuple[tuple[int, ...], tuple[int, ...]]


class Passes:
    """Collects the layers and hidden states of a forward pass. bands: the layers of both bands."""

    def __init__(self, bands: Bands, state_class: type[Any], scorer_class: type[Any], hidden_size: int) -> None:
        self.bands, self.layers = bands, set[int]()
        self.scorer: Any = None
        self._state_class, self._scorer_class, self._hidden_size = state_class, scorer_class, hidden_size
        self._made: dict[str, Any] = {}
        self.closed = False                         # whether the hooks were removed
        self.clear()

    def clear(self) -> None:
        """Forget the current forward pass."""
        self._attended: set[int] = set()
        self._hidden: dict[int, Tensor | None] = {}
        self._prompt: Tensor | None = None

    def make_state(self, config: EpiKVConfig, **sizes: Any) -> Any:
        """Create a layer's State. The first layer also creates the scorer, unless the current one fits."""
        shared = {name: sizes[name] for name in ("batch", "dtype", "device")}
        made = {**shared, "slots": config.slots}
        if made != self._made:
            if self._attended:
                raise ValueError(
                    f"EpiKV's layers share one scorer: all must have the same batch, dtype and device, got {shared} "
                    f"beside {self._made}"
                )
            self.scorer = self._scorer_class(
                config, hidden_size=self._hidden_size, key_value_heads=sizes["key_value_heads"],
                head_dim=sizes["head_dim"], **shared,
            )
            self._made = made
        return self._state_class(config, scorer=self.scorer, **sizes)

    def enter(self, number: int) -> None:
        """RuntimeError, before layer `number` gets tokens, unless the hooks have reported all earlier layers."""
        if self.closed:
            raise RuntimeError(
                "this EpiKVCache is closed: its hooks are removed, so it cannot take more tokens. Create a new cache"
            )
        # A layer that comes again begins a new pass, although the last one is not complete.
        begins = number in self._attended
        if begins and self._attended < self.layers:
            raise RuntimeError(
                f"a forward pass was interrupted after layer {max(self._attended)}: call reset() on the cache and pass "
                "all tokens again"
            )
        bands = enumerate((*self.bands[0], *self.bands[1]))
        unheard = {layer for place, layer in bands if place not in self._hidden and (begins or layer < number)}
        if unheard:
            raise RuntimeError(
                f"EpiKV's hooks did not report the outputs of layers {sorted(unheard)}: an EpiKVCache works only with "
                "the model object that it was created from, so create a new cache for this model. (After an "
                "interrupted forward pass, call reset() on the cache and pass all tokens again)"
            )

    def begin_prompt(self, occupied: Tensor) -> None:
        """Assign slots to a prompt, occupied [B, T], before the first layer stores it."""
        if self._prompt is None:
            self.scorer.admit(occupied, None)
            self._prompt = occupied

    @property
    def between(self) -> bool:
        """Whether no forward pass is under way, and the next one may begin."""
        return not (self.closed or self._attended or self._hidden or self._prompt is not None)

    def attended(self, number: int) -> None:
        """Record that layer `number` has attended."""
        self._attended.add(number)
        self._end()

    def observe(self, number: int, hidden: Tensor) -> None:
        """Record the output of layer `number` in this pass, [B, Q, C]."""
        for place, layer in enumerate((*self.bands[0], *self.bands[1])):
            if layer != number:
                continue
            if self._prompt is not None:
                self.scorer.observe(place, hidden, self._prompt)
                self._hidden[place] = None
            else:
                self._hidden[place] = hidden[:, -1]
        self._end()

    def _end(self) -> None:
        """Advance the scorer once all layers and hidden states are recorded."""
        first, second = map(len, self.bands)
        if self._attended < self.layers or len(self._hidden) < first + second:
            return
        recorded, prompt = [self._hidden[place] for place in range(first + second)], self._prompt
        self.clear()
        if prompt is None:
            states = [hidden for hidden in recorded if hidden is not None]
            # A band of one layer is a view; an empty band has L = 0.
            one = states[0][:, None] if first == 1 else torch.stack(states[:first], 1)
            other = states[first:]
            if len(other) > 1:
                self.scorer.step((one, torch.stack(other, 1)))
            else:
                self.scorer.step((one, other[0][:, None] if other else one[:, :0]))


class BandLayer(StateLayer):
    """The cache of layer `number`: keys and values in the slots of the model's scorer."""

    def __init__(self, config: MethodConfig, passes: Passes, attention_mask: Tensor | None, number: int) -> None:
        super().__init__(config, passes.make_state, attention_mask)  # type: ignore[arg-type]
        self._number, self._passes = number, passes

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """As `StateLayer.update`. RuntimeError if the hooks did not report the layers before."""
        self._passes.enter(self._number)
        return super().update(key_states, value_states, *args, **kwargs)

    def phase(self, seen: int) -> Hashable:
        return super().phase(seen) if self._passes.between else None

    def _in_steps(
        self, query: Tensor, key: Tensor, value: Tensor, spec: MaskSpec, occupied: Tensor | None, seen: int
    ) -> Tensor:
        count = key.shape[2]
        if seen == 0:
            whole = torch.ones(key.shape[0], count, dtype=torch.bool, device=key.device)
            self._passes.begin_prompt(whole if occupied is None else occupied)
        elif count > 1:
            raise one_token_per_pass("EpiKV", count, seen)
        output = super()._in_steps(query, key, value, spec, occupied, seen)
        self._passes.attended(self._number)
        return output


class HiddenStateCache(StateCache):
    """Base class of EpiKV's caches. Each side sets State and Scorer. See `StateCache`."""

    Config = EpiKVConfig
    Scorer: ClassVar[type[Any]]
    refused = (*FROM_MODEL, "bands", "hidden_size")

    def __init__(
        self, model: PreTrainedModel, *, policy: str = "epikv", layers: Any = None,
        compression_ratio: float | None = None, **options: Any,
    ) -> None:
        if not isinstance(model, PreTrainedModel):
            raise TypeError(f"model must be the model itself, which gets hooks, got {type(model).__name__}")
        check_choice("policy", policy, POLICIES)
        if compression_ratio is not None and options.get("keep_prompt", True):
            raise TypeError(
                f"compression_ratio needs keep_prompt=False, and a policy that takes it: {type(self).__name__} keeps "
                "the whole prompt, so pass a budget"
            )
        for name in ("bands", "hidden_size"):
            if name in options:
                raise TypeError(f"{name} is not an option here: the model and layers= determine it")
        self._passes: Passes | None = None
        self._hooks: Callable[[], Any] | None = None
        text = model.config.get_text_config(decoder=True)
        if policy in BANDS:
            if options.get("keep_prompt") is False:
                raise ValueError(
                    f"keep_prompt must be True here for policy {policy!r}: layers before the bands store a prompt "
                    "before its scores are known"
                )
            bands = check_bands(layers, policy, text.num_hidden_layers)
            self._passes = Passes(bands, self.State, self.Scorer, text.hidden_size)
            options |= {"bands": tuple(map(len, bands)), "hidden_size": text.hidden_size}
        elif layers is not None:
            raise ValueError(f"layers must be None for policy {policy!r}, which reads no hidden states")
        super().__init__(model.config, compression_ratio=compression_ratio, policy=policy, **options)
        self._waits |= "count_prompt" not in options and self.config.keep_prompt
        if self._passes is not None:
            self._passes.layers = {n for n, layer in enumerate(self.layers) if isinstance(layer, BandLayer)}
            first = min(number for band in bands for number in band)
            if not self._passes.layers or min(self._passes.layers) > first:
                raise NotImplementedError(f"no layer evicts at or before layer {first}, the first one that EpiKV reads")
            handles = install(model, self._passes, weakref.ref(self))
            # Runs once: in close(), or when the cache is deleted.
            self._hooks = weakref.finalize(self, remove, handles)

    def _config_for(self, budget: int, tokens: int | None = None) -> Any:
        """A prompt that the budget does not fit gets slots of its own, unless the caller decides."""
        config = super()._config_for(budget, tokens)
        if tokens is None or not config.keep_prompt or tokens + config.newest <= budget:
            return config
        warnings.warn(
            f"the prompt's {tokens} tokens and {config.newest} recent ones are more than the budget of {budget}, which "
            f"{type(self).__name__} now applies to generated tokens alone: see count_prompt", stacklevel=2,
        )
        return replace(config, count_prompt=False, max_prompt=tokens)

    def _no_rollback(self) -> str | None:
        shared = f"EpiKV's policy {self.config.policy!r} scores a token for all layers at once, in a pass of its own"
        return super()._no_rollback() if self._passes is None else shared

    def _layer(self, number: int, mask: Tensor | None) -> StateLayer:
        if self._passes is None:
            return StateLayer(self.config, self.State, mask)
        return BandLayer(self.config, self._passes, mask, number)

    def close(self) -> None:
        """Remove the hooks from the model. The cache cannot take more tokens then. Closing it again has no effect.

        Without hooks (policies that read no hidden states) this has no effect.
        """
        if self._passes is None or self._hooks is None:
            return
        self._passes.closed = True
        note_change()
        self._hooks()

    def __enter__(self) -> HiddenStateCache:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __reduce_ex__(self, protocol: Any) -> Any:
        """What copy and pickle call. NotImplementedError for a cache with hooks."""
        if self._passes is not None:
            raise NotImplementedError(
                "EpiKV's cache has hooks in its model, which a copy would not have: create a new cache"
            )
        return super().__reduce_ex__(protocol)

    def reset(self) -> None:
        """Forget every token."""
        super().reset()
        if self._passes is not None:
            self._passes.clear()
            if self._passes.scorer is not None:
                self._passes.scorer.reset()

    @property
    def _shared(self) -> Any:
        return None if self._passes is None else self._passes.scorer

    @property
    def _makers(self) -> tuple[object, ...]:
        return () if self._passes is None else (self._passes,)


def check_bands(layers: object, policy: str, count: int) -> Bands:
    """The layers of both bands in a model of `count` layers: `layers`, or the paper's, scaled to the model, for None.
    """
    if layers is None:
        bands = band_layers(policy, count)
        if set(bands[0]) & set(bands[1]):
            raise ValueError(
                f"layers must be given for a model of {count} layers: scaled from the paper's 32, both bands have "
                f"layer {min(set(bands[0]) & set(bands[1]))}"
            )
        return bands
    if not isinstance(layers, (tuple, list)) or len(layers) != 2:
        raise TypeError(f"layers must be two tuples of layer numbers, such as ((10,), (21,)), got {layers!r}")
    for side, band in enumerate(layers):
        if not isinstance(band, (tuple, list)) or bool(band) != bool(BANDS[policy][side]):
            what = "a tuple of layer numbers" if BANDS[policy][side] else f"() for policy {policy!r}"
            raise TypeError(f"layers[{side}] must be {what}, got {band!r}")
        for place, number in enumerate(band):
            if check_integer(f"layers[{side}][{place}]", number, minimum=0) >= count:
                raise ValueError(f"layers must be below {count}, the model's number of them, got {number}")
        if len(set(band)) < len(band):
            raise ValueError(f"layers[{side}] must name no layer twice, got {tuple(band)}")
    return tuple(layers[0]), tuple(layers[1])


def install(model: PreTrainedModel, passes: Passes, owner: Callable[[], Any]) -> list[Any]:
    """Register hooks that pass the outputs of the layers in the bands to `passes`. Returns their handles.

    owner: returns the cache or None. The hooks ignore forward passes on any other cache, and keep neither the cache nor
    the model alive.
    """
    modules = decoder_layers(model)

    def observe(number: int, hidden: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        cache = owner()
        # Models differ in the name of the argument, and whether it is positional.
        if cache is not None and any(value is cache for value in (*args, *kwargs.values())):
            passes.observe(number, in_autocast(hidden[0] if isinstance(hidden, tuple) else hidden))

    def before(number: int) -> Callable[..., None]:
        def hook(module: Any, args: Any, kwargs: Any) -> None:
            observe(number, args[0] if args else kwargs["hidden_states"], args, kwargs)

        return replayable(hook)

    def after(number: int) -> Callable[..., None]:
        def hook(module: Any, args: Any, kwargs: Any, output: Any) -> None:
            observe(number, output, args, kwargs)

        return replayable(hook)

    return [
        modules[number + 1].register_forward_pre_hook(before(number), with_kwargs=True)
        if number + 1 < len(modules) else modules[number].register_forward_hook(after(number), with_kwargs=True)
        for number in sorted({*passes.bands[0], *passes.bands[1]})
    ]


def replayable(hook: Callable[..., None]) -> Callable[..., None]:
    """Mark a hook that needs not run when a CUDA graph replaces a forward pass: the graph has its work."""
    hook.replayable = True  # type: ignore[attr-defined]
    return hook


def decoder_layers(model: PreTrainedModel) -> torch.nn.ModuleList:
    """The decoder's list of layers, whatever its name: layers, h, blocks... NotImplementedError without one."""
    decoder = model.get_decoder()
    layers = getattr(decoder, "layers", None)
    if isinstance(layers, torch.nn.ModuleList):
        return layers
    count = model.config.get_text_config(decoder=True).num_hidden_layers
    lists = [child for child in decoder.children() if isinstance(child, torch.nn.ModuleList) and len(child) == count]
    if len(lists) != 1:
        raise NotImplementedError(
            f"{type(decoder).__name__} must have one ModuleList of its {count} layers, whose outputs EpiKV reads, got "
            f"{len(lists)}: use policy kv_key, kv_val or lag_kv, which read no hidden states"
        )
    return lists[0]


def remove(handles: list[Any]) -> None:
    """Remove hooks."""
    for handle in handles:
        handle.remove()
