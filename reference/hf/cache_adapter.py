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
from inspect import signature
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
from transformers.cache_utils import DynamicCache, DynamicLayer
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.utils.output_capturing import _active_collector as COLLECTED  # the outputs that a model collects now

from ..contract import MethodConfig
from . import masks
from .cache_adapter_layer import OWNER, StateLayer
from .cache_adapter_recording import Rewindable
from .masks import MaskSpec
from .options import FROM_MODEL
from .progress import NAME, Progress

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
_NO_CHANGE = "{} passes {} to its attention function, which {} does not implement"
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

    Layers with a stock cache run transformers' sdpa attention, or, with a softcap or sinks, the model's own.
    NotImplementedError for arguments that neither supports.
    """
    owner = getattr(key, OWNER, None)
    changes = {name: kwargs[name] for name in _CHANGES_LOGITS if kwargs.get(name) is not None}
    for name in changes:
        if name not in (("softcap", "s_aux") if owner is None else owner().takes):
            by = repr(NAME) if owner is None else f"a {owner().state_name}"
            raise NotImplementedError(_NO_CHANGE.format(type(module).__name__, name, by))
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
        return layer.attend(query, key, value, attention_mask, scaling, kwargs.get("position_ids"), **changes), None
    if changes:
        return _eager(module, query, key, value, attention_mask, scaling=scaling, dropout=dropout, **kwargs), None
    mask = attention_mask.stock if isinstance(attention_mask, MaskSpec) else attention_mask
    if isinstance(mask, Tensor):
        mask = mask.to(query.device)                # for models on several devices, which move tensors but no MaskSpec
    output, _ = sdpa_attention_forward(module, query, key, value, mask, scaling=scaling, dropout=dropout, **kwargs)
    return output, None


def _eager(
    module: torch.nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Any, **kwargs: Any
) -> Tensor:
    """The model's own attention for changed logits, which transformers' sdpa attention would ignore: [B, Q, Hq, D]."""
    attend = getattr(sys.modules[type(module).__module__], "eager_attention_forward", None)
    if attend is None:
        changes = " and ".join(name for name in _CHANGES_LOGITS if kwargs.get(name) is not None)
        raise NotImplementedError(_NO_CHANGE.format(type(module).__name__, changes, repr(NAME)))
    if isinstance(mask, MaskSpec):
        mask = mask.additive(query.dtype)
    elif isinstance(mask, Tensor) and mask.dtype == torch.bool:
        mask = torch.zeros_like(mask, dtype=query.dtype).masked_fill(~mask, torch.finfo(query.dtype).min)
    output: Tensor = attend(module, query, key, value, None if mask is None else mask.to(query.device), **kwargs)[0]
    return output


def in_autocast(tensor: Tensor) -> Tensor:
    """In the dtype that torch.autocast, if it is enabled, gives matrix products."""
    kind = tensor.device.type
    if not torch.is_autocast_enabled(kind) or tensor.dtype == torch.float64:
        return tensor
    return tensor.to(torch.get_autocast_dtype(kind))


# register() is global. Item assignment would change a single instance, which transformers ignores.
AttentionInterface.register(NAME, attention)
AttentionMaskInterface.register(NAME, masks.make_mask)


class StateCache(Rewindable):
    """Base class of the caches for `model.generate(**cache.argument)`. A method's cache sets Config and State.

    config: model.config. budget: the largest number of tokens per layer and row. compression_ratio, in its place: the
    share of the first forward pass's T tokens, padding included, that the budget leaves out, from 0 to below 1: the
    budget is int(T * (1 - compression_ratio)), at least 1, also for later tokens, until `reset`. With
    prefill_chunk_size, T is that of the first chunk. attention_mask: the prompt's [B, T], 1 or True for tokens, 0 for
    padding; needed only if the model is called without one. given: the options of the method's Config except scale
    and softcap, which the model determines. What the Config has no default for has one here: see its `defaults_for`.

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
    `append_block`. NotImplementedError for attention that the methods do not define (position bias, masks that are not
    causal, KV sharing between layers, differential and multi-head latent attention, dropout; softcapped logits and
    sinks unless the State takes blocks) and for output_attentions. In compiled or captured graphs, checks of mask
    elements are assertions on the device (`masks.require`).
    """

    Config: ClassVar[type[MethodConfig]]
    State: ClassVar[type[Any]]

    def __init__(
        self, config: PreTrainedConfig, *, budget: int | None = None, compression_ratio: float | None = None,
        attention_mask: Tensor | None = None, **given: Any,
    ) -> None:
        if not isinstance(config, PreTrainedConfig):
            raise TypeError(f"config must be model.config, got {type(config).__name__}")
        for name in FROM_MODEL:
            if name in given:
                raise TypeError(f"{name} is not an option here: the model determines it")
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

