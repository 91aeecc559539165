"""Where a method's State meets transformers. Everything both sides share, and no mathematics.

In every layer of a forward pass the model first hands its new keys and values to the cache (`StateLayer.update`), then
calls its attention function with what the cache returned. The decisions belong to attention, so the cache only takes
note, ties a tag to the key tensor, and returns both as they came; the attention function registered as "kvtwin" finds
the layer by that tag and drives its State. A State with `append_block` takes every forward pass as it comes; others
take the first tokens as `prefill`, and all that follow one `step` at a time.

transformers builds one mask per forward pass, which cannot tell what each layer's slots hold. The mask function of the
same name therefore returns its arguments (`MaskSpec`): our layers take the padding from them, and layers that keep
their stock cache (sliding windows, other caches) get the stock mask and the stock attention.
"""

from __future__ import annotations

import warnings
import weakref
from dataclasses import replace
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

from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedConfig
from transformers.cache_utils import Cache, CacheLayerMixin, DynamicCache, DynamicLayer
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import causal_mask_function

from ..contract import MethodConfig
from .masks import MaskSpec, readable, refuse_restart, require

NAME = "kvtwin"
ACTIVATE = f'model.set_attn_implementation("{NAME}")'

_OWNER = "_kvtwin_layer"
_SHARING = "no eviction in a model whose layers attend to the keys of another layer (KV sharing)"
# What some models do to the logits: it comes by keyword, and a function that does not know it computes something else.
_CHANGES_LOGITS = ("softcap", "s_aux", "position_bias")


def attention(
    module: torch.nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any,
    scaling: float | None = None, dropout: float = 0.0, **kwargs: Any,
) -> tuple[Tensor, None]:
    """The attention function "kvtwin": query [B, Hq, Q, D] and what the cache returned -> output [B, Q, Hq, D].

    Layers without a cache of ours run transformers' sdpa attention. Raises NotImplementedError for what neither heeds.
    """
    for name in _CHANGES_LOGITS:
        if kwargs.get(name) is not None:
            raise NotImplementedError(
                f"{type(module).__name__} passes {name} to its attention function, which {NAME!r} does not implement"
            )
    owner = getattr(key, _OWNER, None)
    if owner is not None:
        if dropout:
            raise NotImplementedError("no dropout in kvtwin's attention: call model.eval()")
        if kwargs.get("output_attentions"):
            raise NotImplementedError("output_attentions: kvtwin's attention keeps no weights")
        return owner().attend(query, key, value, attention_mask, scaling, kwargs.get("position_ids")), None
    mask = attention_mask.stock if isinstance(attention_mask, MaskSpec) else attention_mask
    if isinstance(mask, Tensor):
        mask = mask.to(query.device)                # a model over several devices moves tensors, but no MaskSpec
    output, _ = sdpa_attention_forward(
        module, query, key, value, mask, scaling=scaling, dropout=dropout, **kwargs
    )
    return output, None


# Class methods of process-wide registries. (Item assignment would reach one instance, which transformers ignores.)
AttentionInterface.register(NAME, attention)
AttentionMaskInterface.register(NAME, MaskSpec)


class StateLayer(CacheLayerMixin):
    """One layer's cache: a State, made when the first tokens come. `state` is None until then."""

    is_sliding = False

    def __init__(self, config: MethodConfig, state_class: type[Any], attention_mask: Tensor | None) -> None:
        # Not the base's __init__, which would set keys and values: they are the state's.
        self.is_initialized = False
        self.state: Any = None
        self._config, self._state_class, self._mask = config, state_class, attention_mask
        self._made: dict[str, Any] = {}     # what the state was made for
        self._seen = 0                      # on the host, so that asking costs nothing
        self._pending = 0                   # tokens that `update` saw and attention did not yet

    @property
    def keys(self) -> Tensor | None:
        return None if self.state is None else self.state.key

    @property
    def values(self) -> Tensor | None:
        return None if self.state is None else self.state.value

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        # The state waits for attention, which alone knows the scaling and the number of query heads.
        self.dtype, self.device = key_states.dtype, key_states.device
        self.is_initialized = True

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Takes note of the new tokens and returns them: key and value [B, Hkv, Q, D], the key with a tag."""
        if self._pending:
            raise RuntimeError(
                f"the last {self._pending} token(s) never came to kvtwin's attention: call {ACTIVATE} before "
                "generating. (If an error interrupted a forward pass, call reset() on the cache)"
            )
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        self._pending = key_states.shape[2]
        self._seen += self._pending
        # Weak, lest layers and tensors keep each other's memory. The model passes this very tensor to attention.
        setattr(key_states, _OWNER, weakref.ref(self))
        return key_states, value_states

    def attend(
        self, query: Tensor, key: Tensor, value: Tensor, mask: object, scaling: float | None,
        position_ids: Tensor | None = None,
    ) -> Tensor:
        """The new tokens' attention, over themselves and what the state holds: [B, Q, Hq, D].

        query [B, Hq, Q, D]; key, value [B, Hkv, Q, D] as `update` returned them; mask and position_ids as the
        attention function has them.
        """
        if not self._pending:
            raise NotImplementedError(_SHARING)
        if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in (query, key, value)):
            raise ValueError("kvtwin's caches have no backward pass: call the model under torch.no_grad()")
        seen = self._seen - self._pending
        self._make_state(query, key, scaling, seen)
        spec = self._spec(mask)
        occupied = self._occupied(spec, key, seen)
        refuse_restart(spec, position_ids, self._mask, seen)
        run = self._in_blocks if hasattr(self.state, "append_block") else self._in_steps
        output = run(query, key, value, spec, occupied, seen)
        self._pending = 0
        return output.transpose(1, 2).contiguous()

    def _in_blocks(
        self, query: Tensor, key: Tensor, value: Tensor, spec: MaskSpec, occupied: Tensor | None, seen: int
    ) -> Tensor:
        """The whole forward pass as it came; a single token by `step`, unless it is padding or may be."""
        if key.shape[2] == 1 and (occupied is None or (readable(occupied) and spec.all("tokens", occupied))):
            return self.state.step(query[:, :, 0], key[:, :, 0], value[:, :, 0])[:, :, None]
        output: Tensor = self.state.append_block(query, key, value, occupied)
        return output

    def _in_steps(
        self, query: Tensor, key: Tensor, value: Tensor, spec: MaskSpec, occupied: Tensor | None, seen: int
    ) -> Tensor:
        """`prefill`, or one step after the other."""
        if seen == 0:
            output: Tensor = self.state.prefill(query, key, value, occupied)
            return output
        if occupied is not None:
            require(
                spec, "tokens", occupied,
                "attention_mask has padding behind tokens that the cache has seen: all of a prompt's padding must lie "
                "in the first forward pass on this cache (a larger prefill_chunk_size; no padded second turn)",
            )
        tokens = range(key.shape[2])
        return torch.stack([self.state.step(query[:, :, t], key[:, :, t], value[:, :, t]) for t in tokens], dim=2)

    def _make_state(self, query: Tensor, key: Tensor, scaling: float | None, seen: int) -> None:
        """A state for these tokens, unless there is one that fits."""
        sizes = {
            "batch": key.shape[0], "query_heads": query.shape[1], "key_value_heads": key.shape[1],
            "head_dim": key.shape[3], "dtype": key.dtype, "device": key.device,
        }
        wanted = {"scaling": scaling, **sizes}
        if wanted == self._made:
            return
        if seen:
            changed = [f"{name} {self._made[name]}, now {wanted[name]}" for name in wanted
                       if wanted[name] != self._made[name]]
            raise ValueError(f"the cache holds tokens of another kind ({'; '.join(changed)}): call reset() on it first")
        self.state = self._state_class(replace(self._config, scale=scaling), **sizes)
        self._made = wanted

    def _spec(self, mask: object) -> MaskSpec:
        """The mask as ours; an empty one if the model gave none but the constructor had one."""
        if isinstance(mask, MaskSpec):
            return mask
        if mask is None and self._mask is not None:
            return MaskSpec(mask_function=causal_mask_function, attention_mask=None)
        what = "no mask" if mask is None else f"a mask of its own ({type(mask).__name__})"
        raise NotImplementedError(
            f"the model handed {what} to attention: an evicting cache needs the padding as attention_mask [B, T]"
        )

    def _occupied(self, spec: MaskSpec, key: Tensor, seen: int) -> Tensor | None:
        """The new tokens' padding, [B, Q] bool, from the model and from the constructor, which must agree.

        None if neither knows of any.
        """
        batch, _, count, _ = key.shape
        given = spec.occupied(seen, count)
        given = None if given is None else given.to(key.device)
        if self._mask is None or self._mask.shape[1] <= seen:
            return given
        rows, total = self._mask.shape
        if batch % rows or (seen == 0 and total < count):
            raise ValueError(
                f"the cache's attention_mask must be [B, T] with B = {batch} (or a divisor, for beams) and T at least "
                f"{count}, got {(rows, total)}"
            )
        own = self._mask[:, seen:seen + count].to(key.device).repeat_interleave(batch // rows, dim=0)
        own = torch.nn.functional.pad(own, (0, count - own.shape[1]), value=True)
        if given is not None:
            require(spec, "same", own == given, "the attention_mask given to the cache differs from the model's")
        return own

    def get_seq_length(self) -> int:
        """Tokens seen, padding included: positions and prompt slicing follow from it, not from what is stored."""
        return self._seen

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """(length, offset) as if nothing were ever evicted."""
        return self._seen + query_length, 0

    def get_max_length(self) -> int:
        """-1: any number of tokens may be seen."""
        return -1

    def reset(self) -> None:
        """Forget every token. The state's memory stays, for a next prompt of the same batch size."""
        if self.state is not None:
            self.state.reset()
        self._seen = self._pending = 0

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Row b becomes what row beam_idx[b] was; [B] of any integer type."""
        if self.state is not None:
            self.state.reorder(beam_idx.to(self.device, torch.int64))


class StateCache(Cache):
    """The cache of one method for `model.generate(past_key_values=...)`; a method's cache names its Config and State.

    config: model.config. budget: the most tokens that a layer holds per row. attention_mask: the prompt's [B, T], 1 or
    True for tokens, 0 for padding; needed only where the model is called without one. options: the method's Config's,
    but for scale, which is the model's.

    Layers with full attention evict; others (sliding windows, linear attention) keep transformers' own cache, and a
    model with no layer that evicts gets a UserWarning. Greedy, sampling and beam search work; assisted decoding, which
    must roll back, raises NotImplementedError.

    A State that takes blocks (it has `append_block`) gets every forward pass as it comes, be it a prompt, a chunk of
    one (`prefill_chunk_size`), or a second turn on the same cache; it cuts what is longer than its block_size. Padding
    may lie anywhere. For any other State the first forward pass on an empty cache is its `prefill` and may hold
    padding; all later tokens go through `step` one at a time, so a prompt in chunks is evicted as a stream is.

    Raises TypeError or ValueError for bad arguments. While the model runs: RuntimeError if its attention is not
    "kvtwin"; ValueError for masks of another length, outside torch.no_grad(), for tokens that transformers feeds a
    second time, and for padding after the first pass where the State takes none; NotImplementedError for attention
    that the methods do not define (softcap, sinks, position bias, masks that are not causal, KV sharing between layers,
    dropout). In graphs, compiled or captured, what asks for the mask's values is an assertion on the device
    (`masks.require`).
    """

    Config: ClassVar[type[MethodConfig]]
    State: ClassVar[type[Any]]

    def __init__(
        self, config: PreTrainedConfig, *, budget: int, attention_mask: Tensor | None = None, **options: Any
    ) -> None:
        if not isinstance(config, PreTrainedConfig):
            raise TypeError(f"config must be the model's config, model.config, got {type(config).__name__}")
        if "scale" in options:
            raise TypeError("scale is not an option here: the model says how it scales its logits")
        if getattr(config.get_text_config(decoder=True), "num_kv_shared_layers", 0):
            raise NotImplementedError(_SHARING)
        self.config = self._method_config(budget, options)
        mask = _as_mask(attention_mask)
        layers = [
            self._layer(number, mask) if type(layer) is DynamicLayer else layer
            for number, layer in enumerate(DynamicCache(config=config).layers)
        ]
        if not any(isinstance(layer, StateLayer) for layer in layers):
            warnings.warn(
                f"no layer of this {type(config).__name__} has full attention, so nothing will be evicted: "
                f"{type(self).__name__} leaves sliding windows and linear attention as they are",
                stacklevel=2,
            )
        super().__init__(layers=layers)

    def _method_config(self, budget: int, options: dict[str, Any]) -> Any:
        """The method's config with this budget."""
        return self.Config(budget=budget, **options)

    def _layer(self, number: int, mask: Tensor | None) -> StateLayer:
        """The cache of the model's layer `number`, which has full attention."""
        return StateLayer(self.config, self.State, mask)

    def activate_past_recording(self) -> None:
        """Assisted decoding calls this first, meaning to `crop` what it must take back."""
        raise NotImplementedError("evicted tokens cannot be brought back: no assisted or speculative decoding")

    def crop(self, tokens_to_remove: int) -> None:
        if tokens_to_remove:
            raise NotImplementedError("evicted tokens cannot be brought back: no crop(); reset() starts anew")

    def batch_repeat_interleave(self, repeats: int) -> None:
        raise NotImplementedError("the number of rows is fixed by the first forward pass")

    def batch_select_indices(self, indices: Tensor) -> None:
        raise NotImplementedError("the number of rows is fixed by the first forward pass")


def _as_mask(attention_mask: object) -> Tensor | None:
    if attention_mask is None:
        return None
    if not isinstance(attention_mask, Tensor):
        raise TypeError(f"attention_mask must be a torch.Tensor [B, T], got {type(attention_mask).__name__}")
    if attention_mask.dim() != 2 or attention_mask.is_floating_point():
        raise ValueError(
            "attention_mask must be [B, T] of bools or integers, 0 for padding, "
            f"got {tuple(attention_mask.shape)} of {attention_mask.dtype}"
        )
    return attention_mask.bool()
