"""The cache adapter for transformers that both sides share. It contains no mathematics.

In every layer of a forward pass, the model first passes its new keys and values to the cache (`StateLayer.update`),
then calls its attention function with what the cache returned. A State evicts during attention, so `update` only counts
the tokens, attaches a reference to the layer to the key tensor, and returns both tensors unchanged. The attention
function registered as "kvtwin" finds the layer by this reference and calls its State. A State with `append_block` takes
every forward pass as one call, the first by `prefill`; any other takes the first tokens by `prefill` and each later
token by `step`.

transformers makes one mask per forward pass, which cannot describe the slots of each layer. The mask function
registered as "kvtwin" therefore returns its arguments (`MaskSpec`): our layers read the padding from them, and layers
with a stock cache (sliding windows, other caches) get the stock mask and the stock attention.

`Progress` detects forward passes that were interrupted or that used another attention function.
"""

from __future__ import annotations

import sys
import warnings
import weakref
from collections.abc import Callable, Hashable
from dataclasses import replace
from inspect import signature
from math import prod
from typing import Any, ClassVar

import torch
from torch import Tensor

try:
    import transformers  # noqa: F401
except ModuleNotFoundError as error:
    if error.name != "transformers":
        raise
    raise ImportError(
        "kvtwin.reference.hf and kvtwin.optimized.hf need transformers, which is not installed: "
        "python -m pip install 'kvtwin[hf]'",
        name="transformers",
    ) from None

from transformers import AttentionInterface, AttentionMaskInterface, GenerationMixin, PreTrainedConfig
from transformers.cache_utils import CacheLayerMixin, DynamicCache, DynamicLayer
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.utils.output_capturing import _active_collector as COLLECTED  # the outputs that a model collects now

from ..contract import MethodConfig
from . import masks
from .cache_adapter_recording import Recording, Rewindable
from .masks import MaskSpec
from .progress import ACTIVATE, NAME, Progress

_OWNER = "_kvtwin_layer"
_SHARING = "no eviction in a model whose layers attend to the keys of another layer (KV sharing)"
_SEVERAL = (
    "{} attends several times to the keys of one pass, as differential attention does. A cache evicts by one attention "
    "per layer, so kvtwin's caches do not support this model: use transformers' own cache"
)
_NO_WEIGHTS = (
    "output_attentions=True is not supported: kvtwin's caches store no weights, and evicted tokens have none. Use "
    "transformers' own cache with model.set_attn_implementation(\"eager\")"
)
# Keyword arguments by which some models change the logits. Ignoring them would compute another attention.
_CHANGES_LOGITS = ("softcap", "s_aux", "position_bias")
#: The argument of models and of generate that takes a cache: transformers 5.24 has renamed it.
NAMES = "cache", "past_key_values"
_TAKEN = signature(GenerationMixin.prepare_inputs_for_generation).parameters
ARGUMENT = next(name for name in NAMES if name in _TAKEN)
#: Caches whose steps are replays of CUDA graphs: those within `kvtwin.optimized.hf.captured`.
REPLAYED: weakref.WeakSet[Any] = weakref.WeakSet()
_OF_PROMPTS = getattr(getattr(GenerationMixin, "_prefill", None), "__code__", None)     # generate's method for prompts


def attention(
    module: torch.nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any,
    scaling: float | None = None, dropout: float = 0.0, **kwargs: Any,
) -> tuple[Tensor, None]:
    """The attention function "kvtwin": query [B, Hq, Q, D] and the key and value of `update` -> output [B, Q, Hq, D].

    Layers with a stock cache run transformers' sdpa attention. NotImplementedError for arguments that neither supports.
    """
    for name in _CHANGES_LOGITS:
        if kwargs.get(name) is not None:
            raise NotImplementedError(
                f"{type(module).__name__} passes {name} to its attention function, which {NAME!r} does not implement"
            )
    owner = getattr(key, _OWNER, None)
    if owner is not None:
        if dropout:
            raise NotImplementedError("kvtwin's attention does not support dropout: call model.eval()")
        if kwargs.get("output_attentions"):
            raise NotImplementedError(_NO_WEIGHTS)
        layer = owner()
        if not layer.pending:
            again = getattr(module, "layer_idx", None) == layer.number
            raise NotImplementedError(_SEVERAL.format(type(module).__name__) if again else _SHARING)
        query, key, value = (in_autocast(tensor) for tensor in (query, key, value))
        return layer.attend(query, key, value, attention_mask, scaling, kwargs.get("position_ids")), None
    mask = attention_mask.stock if isinstance(attention_mask, MaskSpec) else attention_mask
    if isinstance(mask, Tensor):
        mask = mask.to(query.device)                # for models on several devices, which move tensors but no MaskSpec
    output, _ = sdpa_attention_forward(module, query, key, value, mask, scaling=scaling, dropout=dropout, **kwargs)
    return output, None


def in_autocast(tensor: Tensor) -> Tensor:
    """In the dtype that torch.autocast, if it is enabled, gives matrix products."""
    kind = tensor.device.type
    if not torch.is_autocast_enabled(kind) or tensor.dtype == torch.float64:
        return tensor
    return tensor.to(torch.get_autocast_dtype(kind))


# register() is global. Item assignment would change a single instance, which transformers ignores.
AttentionInterface.register(NAME, attention)
AttentionMaskInterface.register(NAME, masks.make_mask)


class StateLayer(CacheLayerMixin):
    """The cache of one layer: a State, created with the first tokens. `state` is None before."""

    is_sliding = False
    number = -1                             # of the layer in its model, which the cache sets

    def __init__(self, config: MethodConfig, state_class: type[Any], attention_mask: Tensor | None) -> None:
        # The base's __init__ is not called: it sets keys and values, which are properties here.
        self.is_initialized = False
        self.state: Any = None
        self._config, self._state_class = config, state_class
        self._given = self._mask = attention_mask       # the latter in the rows that the layer has now
        self._made: dict[str, Any] = {}     # the arguments of the state
        self._seen = 0                      # tokens, counted on the host to avoid a synchronization
        self._pending = 0                   # tokens passed to `update` but not yet to attention
        self.recording: Recording | None = None     # what takes tokens back, if that may be asked for
        # A compiled pass reads these instead of `_seen`, which would be a constant or an argument of its graph.
        self._begun = False                 # whether the layer has seen tokens
        self._covered = False               # whether the constructor's mask has tokens that the layer has not seen
        self._behind = False                # whether compiled passes have added tokens that `_seen` lacks
        self.is_compileable = getattr(state_class, "_compiles", lambda config: False)(config)

    @property
    def pending(self) -> int:
        """The number of tokens passed to `update` but not yet to attention."""
        return self._pending

    @property
    def is_croppable(self) -> bool:
        """Whether tokens can be taken back."""
        return self.recording is not None

    @property
    def rows(self) -> int:
        """The number of rows of the state."""
        return int(self._made["batch"])

    @property
    def full_nbytes(self) -> int:
        """The bytes of the keys and values of all tokens seen, padding included."""
        size = ("batch", "key_value_heads", "head_dim")
        return 2 * self._on_host() * self._made["dtype"].itemsize * prod(self._made[name] for name in size) \
            if self._made else 0

    def configure(self, config: MethodConfig) -> None:
        """Give the layer another config, before its first tokens. The state for it is created with these."""
        if config != self._config:
            self._config, self._made = config, {}

    @property
    def counted(self) -> Tensor | None:
        """The number of tokens as a tensor [1] on the device, in a compiled pass after the first; None in others."""
        on_device = torch.compiler.is_compiling() and self.is_compileable and self._begun
        return self.state._seen if on_device else None

    @property
    def keys(self) -> Tensor | None:
        return None if self.state is None else self.state.key

    @property
    def values(self) -> Tensor | None:
        return None if self.state is None else self.state.value

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        # The state is created by `attend`, which has the scaling and the number of query heads.
        self.dtype, self.device = key_states.dtype, key_states.device
        self.is_initialized = True

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Count the new tokens and return key and value [B, Hkv, Q, D], the key with a reference to this layer."""
        if self._pending:
            raise RuntimeError(
                f"the last {self._pending} token(s) did not reach kvtwin's attention: call {ACTIVATE} before "
                "generating. (If an error interrupted a forward pass, call reset() on the cache)"
            )
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        self._pending = key_states.shape[2]
        if self.is_compileable and torch.compiler.is_compiling():
            self._behind = True
        else:
            self._seen = self._on_host() + self._pending
        # A weak reference, to avoid a cycle of layer and tensor. The model passes this tensor object to attention.
        setattr(key_states, _OWNER, weakref.ref(self))
        return key_states, value_states

    def attend(
        self, query: Tensor, key: Tensor, value: Tensor, mask: object, scaling: float | None,
        position_ids: Tensor | None = None,
    ) -> Tensor:
        """Attention of the new tokens, to themselves and the cached tokens: [B, Q, Hq, D].

        query [B, Hq, Q, D]; key, value [B, Hkv, Q, D] as `update` returned them; mask, scaling and position_ids as
        passed to the attention function. ValueError or NotImplementedError as described in `StateCache`.
        """
        if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in (query, key, value)):
            raise ValueError("kvtwin's caches have no backward pass: call the model under torch.no_grad()")
        compiled = self.is_compileable and torch.compiler.is_compiling()
        seen = self._seen - self._pending if not compiled else None if self._begun else 0
        self._make_state(query, key, scaling, seen)
        spec = masks.spec_of(mask, self._mask)
        own = self._mask if seen is not None or self._covered else None
        occupied = masks.new_tokens(spec, own, key, seen, self.counted)
        if seen is not None:
            masks.refuse_restart(spec, position_ids, self._mask, seen)
            self._covered = self._mask is not None and self._mask.shape[1] > seen + self._pending
        run: Callable[..., Tensor] = self._in_blocks if hasattr(self.state, "append_block") else self._in_steps
        if self.recording is None:
            output = run(query, key, value, spec, occupied, seen)
        else:
            assert seen is not None             # no compiled pass: see `StateCache.update`
            output = self.recording.run(self, run, (query, key, value), spec, occupied, seen)
        self._pending, self._begun = 0, True
        return output.transpose(1, 2).contiguous()

    def _in_blocks(
        self, query: Tensor, key: Tensor, value: Tensor, spec: MaskSpec, occupied: Tensor | None, seen: int
    ) -> Tensor:
        """Pass the first tokens to `prefill`, later ones to `append_block`, or to `step` a single one that is not
        padding."""
        if key.shape[2] == 1 and masks.none_is_padding(spec, occupied):
            return self.state.step(query[:, :, 0], key[:, :, 0], value[:, :, 0])[:, :, None]
        takes = self.state.prefill if seen == 0 and masks.readable(key) else self.state.append_block
        output: Tensor = takes(query, key, value, occupied)
        return output

    def _in_steps(
        self, query: Tensor, key: Tensor, value: Tensor, spec: MaskSpec, occupied: Tensor | None, seen: int
    ) -> Tensor:
        """Pass the first tokens to `prefill`, later ones to `step`, one at a time."""
        if seen == 0:
            output: Tensor = self.state.prefill(query, key, value, occupied)
            return output
        if occupied is not None:
            masks.require(
                spec, "tokens", occupied,
                "attention_mask has padding behind tokens that the cache has seen: all of a prompt's padding must lie "
                "in the first forward pass on this cache (a larger prefill_chunk_size; no padded second turn)",
            )
        tokens = zip(*(one.unbind(2) for one in (query, key, value)), strict=True)
        outputs: list[Tensor] = [self.state.step(*token) for token in tokens]
        return outputs[0][:, :, None] if len(outputs) == 1 else torch.stack(outputs, dim=2)

    def _make_state(self, query: Tensor, key: Tensor, scaling: float | None, seen: int | None) -> None:
        """Create a state for these tokens, unless the current one fits. ValueError if that one holds tokens."""
        sizes = {
            "batch": key.shape[0], "query_heads": query.shape[1], "key_value_heads": key.shape[1],
            "head_dim": key.shape[3], "dtype": key.dtype, "device": key.device,
        }
        wanted = {"scaling": scaling, **sizes}
        if wanted == self._made:
            return
        if seen != 0:
            changed = [f"{name} {self._made[name]}, now {wanted[name]}" for name in wanted
                       if wanted[name] != self._made[name]]
            raise ValueError(f"the cache holds tokens of another kind ({'; '.join(changed)}): call reset() on it first")
        self.state, self._made = self._new_state(**wanted), wanted

    def _new_state(self, scaling: Any, **sizes: Any) -> Any:
        state = self._state_class(replace(self._config, scale=scaling), **sizes)
        if self.is_compileable and not torch.compiler.is_compiling():
            for tensor in state._tensors():             # otherwise a compiler makes no CUDA graphs of steps
                torch._dynamo.mark_static_address(tensor)
        return state

    def get_seq_length(self) -> int:
        """The number of tokens seen, padding included, from which transformers derives positions. In a compiled pass a
        tensor, on the device; the first call after such passes synchronizes with the GPU."""
        counted = self.counted
        return self._on_host() if counted is None else counted[0]  # type: ignore[return-value]

    def _on_host(self) -> int:
        if not torch.compiler.is_compiling() and self._behind:
            self._seen, self._behind = self.state.tokens_seen, False
        return self._seen

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """(length, offset) of the mask, as if no token were evicted. `generate` asks before each compiled pass."""
        if self._behind and not torch.compiler.is_compiling():
            self.state._expect(query_length)
        return query_length if self.uncounted else self._seen + query_length, 0

    @property
    def uncounted(self) -> bool:
        """Whether the host does not know the number of tokens without a synchronization."""
        return self._begun and self.is_compileable if torch.compiler.is_compiling() else self._behind

    def get_max_length(self) -> int:
        """-1: the number of tokens is not limited."""
        return -1

    def phase(self, seen: int) -> Hashable:
        """What the host decides in the next forward pass, after `seen` tokens, if it has one token that is not padding:
        passes of the same phase launch the same work. None for the first pass, for tokens that the constructor's mask
        covers, and after an interrupted pass.
        """
        covered = self._mask is not None and self._mask.shape[1] > seen
        unlike = covered or self._pending or self.recording is not None
        return None if seen == 0 or self._on_host() != seen or unlike else ()

    def no_padding(self, mask: object, position_ids: Tensor | None, seen: int) -> bool | Tensor | None:
        """Whether that pass's token is padding in no row: see `masks.no_padding`."""
        return masks.no_padding(mask, position_ids, self._mask, seen)

    def reset(self) -> None:
        """Forget every token. The state stays allocated for the next prompt of the same batch size."""
        if self.state is not None:
            self.state.reset()
        self._seen = self._pending = 0
        self._begun = self._covered = self._behind = False
        self._mask, self.recording = self._given, None

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Replace row b by row beam_idx[b]: beam_idx [B] int64, checked by the cache."""
        if self.state is not None:
            self.state.reorder(beam_idx.to(self.device))
            self._forget_record()

    def _forget_record(self) -> None:
        """Other rows than the recorded ones follow."""
        if self.recording is not None:
            self.recording = Recording(self.recording.prompt)

    def state_of_rows(self, index: Tensor) -> Any:
        """A new state with the rows `index` [N] int64 of this layer's. NotImplementedError for States of others."""
        if not hasattr(self.state, "_take_rows"):
            raise NotImplementedError(f"a {type(self.state).__name__} that is not kvtwin's keeps its number of rows")
        state = self._new_state(**{**self._made, "batch": len(index)})
        state._take_rows(self.state, index.to(self.device))
        return state

    def adopt(self, state: Any, index: Tensor) -> None:
        """From here on, use a state with the rows `index` [N] of the present one."""
        if self._mask is not None:
            rows = self._mask.repeat_interleave(self.rows // len(self._mask), dim=0)
            self._mask = rows.index_select(0, index.to(rows.device))
        self.state, self._made = state, {**self._made, "batch": len(index)}
        self._forget_record()

    def take_back(self, count: int) -> None:
        """Forget the last `count` tokens, which were recorded."""
        assert self.recording is not None
        self.recording.take_back(self.state, count)
        self._seen = self._on_host() - count


class StateCache(Rewindable):
    """Base class of the caches for `model.generate(**cache.argument)`. A method's cache sets Config and State.

    config: model.config. budget: the largest number of tokens per layer and row. compression_ratio, in its place: the
    share of the first forward pass's T tokens, padding included, that the budget leaves out, from 0 to below 1: the
    budget is int(T * (1 - compression_ratio)), at least 1, also for later tokens, until `reset`. With
    prefill_chunk_size, T is that of the first chunk. attention_mask: the prompt's [B, T], 1 or True for tokens, 0 for
    padding; needed only if the model is called without one. given: the options of the method's Config except scale,
    which the model determines. What the Config has no default for has one here: see its `defaults_for`.

    `nbytes` and `full_nbytes` are the bytes that the cache and a full one take. The reference stores quantized tokens
    unpacked.

    Layers with full attention evict. Other layers (sliding windows, linear attention) keep transformers' cache; a model
    without a layer that evicts gets a UserWarning. Greedy decoding, sampling, beam search and assisted decoding
    are supported; the latter costs a copy of the state in each forward pass.

    A State with `append_block` takes every forward pass, be it a prompt, a chunk of it (`prefill_chunk_size`) or a
    second turn on the same cache, and splits it into blocks of block_size. Padding may be anywhere. For any other State
    the first forward pass on an empty cache is the `prefill` and may have padding; all later tokens go through `step`
    one at a time, so the later chunks of a prompt are evicted like generated tokens.

    TypeError or ValueError for invalid arguments. While the model runs: RuntimeError if its attention function is not
    "kvtwin", or after an interrupted forward pass until `reset`. ValueError for masks of the wrong length, outside of
    torch.no_grad(), for tokens that transformers passes again, and for padding after the first pass if the State has no
    `append_block`. NotImplementedError for attention that the methods do not define (softcap, sinks, position bias,
    masks that are not causal, KV sharing between layers, differential and multi-head latent attention, dropout) and for
    output_attentions. In compiled or captured graphs, checks of mask elements are assertions on the device
    (`masks.require`).
    """

    Config: ClassVar[type[MethodConfig]]
    State: ClassVar[type[Any]]

    def __init__(
        self, config: PreTrainedConfig, *, budget: int | None = None, compression_ratio: float | None = None,
        attention_mask: Tensor | None = None, **given: Any,
    ) -> None:
        if not isinstance(config, PreTrainedConfig):
            raise TypeError(f"config must be model.config, got {type(config).__name__}")
        if "scale" in given:
            raise TypeError("scale is not an option here: the model determines it")
        if getattr(config.get_text_config(decoder=True), "num_kv_shared_layers", 0):
            raise NotImplementedError(_SHARING)
        self._configure(budget, compression_ratio, given)
        mask = masks.as_mask(attention_mask)
        layers = [
            self._layer(number, mask) if type(layer) is DynamicLayer else layer
            for number, layer in enumerate(DynamicCache(config=config).layers)
        ]
        for number, layer in enumerate(layers):
            if isinstance(layer, StateLayer):
                layer.number = number
        if not any(isinstance(layer, StateLayer) for layer in layers):
            warnings.warn(
                f"no layer of this {type(config).__name__} has full attention, so nothing will be evicted: "
                f"{type(self).__name__} does not change sliding windows and linear attention",
                stacklevel=2,
            )
        super().__init__(layers=layers)
        self._progress = Progress(layers, config)

    @property
    def argument(self) -> dict[str, Any]:
        """The cache under the name that `generate` and forward passes have for it: "cache" in transformers 5.24 and
        later, "past_key_values" before."""
        return {ARGUMENT: self}

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Pass new keys and values to a layer. RuntimeError unless all earlier passes reached all layers;
        NotImplementedError if the model shall return attention weights, which some models do not tell attention."""
        if not torch.compiler.is_compiling() and any(name.endswith("attentions") for name in COLLECTED.get() or ()):
            raise NotImplementedError(_NO_WEIGHTS)
        self._progress.enter(layer_idx)
        if self.recording and torch.compiler.is_compiling():
            raise NotImplementedError("a forward pass whose tokens the cache may take back must not be compiled")
        if self._waits and layer_idx == self._progress.first and not self.layers[layer_idx]._begun:
            recording, tokens = self.layers[layer_idx].recording, key_states.shape[2]
            self._begin(tokens if recording is None else recording.of_prompt(tokens))
        updated: tuple[Tensor, Tensor] = super().update(key_states, value_states, layer_idx, *args, **kwargs)
        return updated

    @property
    def is_compileable(self) -> bool:
        """Whether `generate` may compile decode steps. Its method for prompts, which asks the same, gets False:
        compiled chunks are right, but their graphs reach the compiler's limit, and steps then have none. So do steps
        that are replays: `generate` would make a mask for each of them."""
        if not torch.compiler.is_compiling():
            asks = sys._getframe(1).f_back
            if self.recording or self in REPLAYED or (asks is not None and asks.f_code is _OF_PROMPTS):
                return False
        return all(layer.is_compileable for layer in self.layers)               # PyTorch 2.11 compiles no super()

    def get_query_offset(self, layer_idx: int = 0) -> int:
        """The number of tokens before those of a pass, for its mask: see `StateLayer.get_mask_sizes`."""
        layer = self.layers[layer_idx]
        return 0 if isinstance(layer, StateLayer) and layer.uncounted else super().get_query_offset(layer_idx)

    def _check_progress(self) -> None:
        self._progress.common_length()

    def _no_rollback(self) -> str | None:
        kept = hasattr(self.State, "_take_rows")
        return None if kept else f"a {self.State.__name__} that is not kvtwin's takes no token back"

    def _layer(self, number: int, mask: Tensor | None) -> StateLayer:
        """Create the cache of layer `number`, which has full attention."""
        return StateLayer(self._config_of(number), self.State, mask)

