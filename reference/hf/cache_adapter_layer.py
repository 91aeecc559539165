"""The cache of one layer: a State, and the numbers that the host has of its tokens. It has no mathematics; both sides
share it.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Hashable
from dataclasses import replace
from inspect import signature
from math import prod
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import CacheLayerMixin

from ..contract import MethodConfig
from . import masks
from .cache_adapter_recording import Recording
from .masks import MaskSpec
from .progress import ACTIVATE

#: The attribute of a key tensor with a reference to the layer that returned it.
OWNER = "_kvtwin_layer"


class StateLayer(CacheLayerMixin):
    """The cache of one layer: a State, created with the first tokens. `state` is None before."""

    is_sliding = False
    number = -1                             # of the layer in its model, which the cache sets

    def __init__(self, config: MethodConfig, state_class: type[Any], attention_mask: Tensor | None) -> None:
        # The base's __init__ is not called: it sets keys and values, which are properties here.
        self.is_initialized = False
        self.state: Any = None
        self._config, self._state_class = config, state_class
        self._takes_sinks = "sink_logits" in signature(state_class).parameters
        self._sinks: Tensor | None = None   # the model's parameter
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
    def state_name(self) -> str:
        """The name of the State's class; `_state_class` may be a function."""
        return type(self._config).__name__.replace("Config", "State")

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
    def takes(self) -> tuple[str, ...]:
        """The arguments of an attention function that change logits and that the State supports."""
        return ("softcap",) * hasattr(self._config, "softcap") + ("s_aux",) * self._takes_sinks

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
        setattr(key_states, OWNER, weakref.ref(self))
        return key_states, value_states

    def attend(
        self, query: Tensor, key: Tensor, value: Tensor, mask: object, scaling: float | None,
        position_ids: Tensor | None = None, **changes: Any,
    ) -> Tensor:
        """Attention of the new tokens, to themselves and the cached tokens: [B, Q, Hq, D].

        query [B, Hq, Q, D]; key, value [B, Hkv, Q, D] as `update` returned them; mask, scaling, position_ids and
        `changes` of the logits (those of `takes`) as passed to the attention function. ValueError or
        NotImplementedError as described in `StateCache`.
        """
        if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in (query, key, value)):
            raise ValueError("kvtwin's caches have no backward pass: call the model under torch.no_grad()")
        compiled = self.is_compileable and torch.compiler.is_compiling()
        seen = self._seen - self._pending if not compiled else None if self._begun else 0
        self._make_state(query, key, scaling, seen, **changes)
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

    def _make_state(
        self, query: Tensor, key: Tensor, scaling: float | None, seen: int | None, *, softcap: float | None = None,
        s_aux: Tensor | None = None,
    ) -> None:
        """Create a state for these tokens, unless the current one fits. ValueError if that one holds tokens."""
        sizes: dict[str, Any] = {
            "batch": key.shape[0], "query_heads": query.shape[1], "key_value_heads": key.shape[1],
            "head_dim": key.shape[3], "dtype": key.dtype, "device": key.device, "softcap": softcap,
            "sinks": s_aux is not None,
        }
        wanted = {"scaling": scaling, **sizes}
        if s_aux is not self._sinks and not torch.compiler.is_compiling():
            self._sinks = s_aux             # of the same module: a tensor in place of the one before
            if self.state is not None and s_aux is not None:
                self.state.sink_logits = s_aux.detach()
        if wanted == self._made:
            return
        if seen != 0:
            changed = [f"{name} {self._made[name]}, now {wanted[name]}" for name in wanted
                       if wanted[name] != self._made[name]]
            raise ValueError(f"the cache holds tokens of another kind ({'; '.join(changed)}): call reset() on it first")
        self.state, self._made = self._new_state(scaling, **sizes), wanted

    def _new_state(self, scaling: Any, sinks: bool, softcap: float | None, **sizes: Any) -> Any:
        changes: dict[str, Any] = {} if softcap is None else {"softcap": softcap}
        if sinks:
            sizes["sink_logits"] = self._sinks
        state = self._state_class(replace(self._config, scale=scaling, **changes), **sizes)
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
