"""Tokens that a cache takes back, for assisted decoding. Both sides share this module, which contains no mathematics.

While a cache records, a layer copies its state before each forward pass, and passes its tokens one at a time, as they
come without an assistant. `crop` puts the copy back and passes those tokens again that stay.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationMixin

from ..contract.arguments import check_integer
from . import masks
from .cache_adapter_rows import Rows
from .masks import MaskSpec

_ASSISTED = getattr(getattr(GenerationMixin, "_assisted_decoding", None), "__code__", None)
_PADDING = "attention_mask has padding among tokens that the cache may take back: it records tokens without padding"


class Recording:
    """What a layer needs to take back tokens of its last forward pass."""

    def __init__(self, prompt: int | None) -> None:
        self.prompt = prompt                    # tokens of a first pass that are no candidates; None: all of them
        self._before: Any = None                # the state before `_tokens`
        self._tokens: tuple[Tensor, ...] = ()   # query [B, Hq, N, D], key and value [B, Hkv, N, D]

    @property
    def count(self) -> int:
        """The number of tokens that can be taken back."""
        return self._tokens[0].shape[2] if self._tokens else 0

    def of_prompt(self, count: int) -> int:
        """How many of the first pass's `count` tokens belong to the prompt."""
        return count if self.prompt is None else min(self.prompt, count)

    def run(
        self, layer: Any, attend: Callable[..., Tensor], tokens: tuple[Tensor, ...], spec: MaskSpec,
        occupied: Tensor | None, seen: int,
    ) -> Tensor:
        """The output of the pass of `tokens`, query, key and value. attend: `layer._in_blocks` or `_in_steps`."""
        count = tokens[0].shape[2]
        prompt = self.of_prompt(count) if seen == 0 else 0
        if occupied is not None and prompt < count:
            masks.require(spec, "recorded", occupied[:, prompt:], _PADDING)
        outputs = []
        if prompt:
            first = (tensor[:, :, :prompt] for tensor in tokens)
            outputs.append(attend(*first, spec, None if occupied is None else occupied[:, :prompt], seen))
        self._tokens = tuple(tensor[:, :, prompt:].clone() for tensor in tokens)
        self._keep(layer.state)
        for place in range(prompt, count):
            one = (tensor[:, :, place:place + 1] for tensor in tokens)
            outputs.append(attend(*one, spec, None, seen + place))
        return torch.cat(outputs, 2)

    def _keep(self, state: Any) -> None:
        if self._before is None or self._before._num_rows != state._num_rows:
            with torch.inference_mode(False), torch.no_grad():
                self._before = copy.deepcopy(state)
        else:
            self._before._take_rows(state, _all_rows(state))

    def take_back(self, state: Any, count: int) -> None:
        """Make the state what it was before its last `count` tokens. After an error, it needs a reset."""
        kept = self.count - count
        tokens = tuple(tensor[:, :, :kept] for tensor in self._tokens)
        try:
            state._take_rows(self._before, _all_rows(state))
            for token in zip(*(tensor.unbind(2) for tensor in tokens), strict=True):
                state.step(*token)
        except BaseException:
            state._interrupted = "crop"
            raise
        self._tokens = tokens


def _all_rows(state: Any) -> Tensor:
    return torch.arange(state._num_rows, device=state.device)


class Rewindable(Rows):
    """A cache that can take back the tokens of its last forward pass, if it recorded it."""

    def _no_rollback(self) -> str | None:
        """Why this cache cannot take tokens back, None if it can."""
        return None

    @property
    def recording(self) -> bool:
        """Whether tokens of the next forward passes can be taken back."""
        return any(getattr(layer, "recording", None) is not None for layer in self.layers)

    def activate_past_recording(self) -> None:
        """Until `reset`, copy the states before each forward pass, so that `crop` can take its tokens back.

        Assisted decoding calls this, also with prompt_lookup_num_tokens. It gives the same tokens as without an
        assistant. NotImplementedError, which says why, for a cache that cannot.
        """
        why = self._no_rollback()
        for layer in self.layers:
            if not hasattr(layer, "pending") and not hasattr(layer, "crop"):
                why = f"a {type(layer).__name__} keeps its tokens"
        if why is None:
            prompt, why = prompt_of(sys._getframe(1), self.get_seq_length())
        if why is not None:
            raise NotImplementedError(
                f"assisted decoding is not supported: {why}. Leave assistant_model and prompt_lookup_num_tokens out"
            )
        super().activate_past_recording()
        for layer in self.layers:
            if hasattr(layer, "pending"):
                layer.recording = Recording(prompt)

    def crop(self, tokens_to_remove: int) -> None:
        """Take back the last -tokens_to_remove tokens, which must be of the last forward pass after a prompt.

        ValueError or TypeError for other numbers, NotImplementedError unless `activate_past_recording` came before that
        pass, RuntimeError if it was interrupted, all before a layer changes.
        """
        number: Any = tokens_to_remove
        if isinstance(number, Tensor) and number.dim() == 0:        # as transformers 5.17 passes it
            number = number.item()
        count = -check_integer("tokens_to_remove", number)
        if count < 0:
            raise ValueError(f"tokens_to_remove must be 0 or negative, the number of tokens to remove, got {-count}")
        if not self.recording:
            if count:
                raise NotImplementedError(
                    "evicted tokens cannot be restored: crop() takes back only tokens that came after "
                    "activate_past_recording(). reset() empties the cache"
                )
            return
        self._rows_now("crop")
        used = self._with_tokens()
        for layer in used if count else ():
            if count > layer.recording.count:
                raise ValueError(
                    f"tokens_to_remove must be from {-layer.recording.count} to 0: only tokens of the last forward "
                    f"pass, and none of a prompt, can be taken back, got {-count}"
                )
        for layer in used if count else ():
            layer.take_back(count)
        for layer in self.layers:
            if not hasattr(layer, "pending"):
                layer.crop(-count)


def prompt_of(caller: Any, seen: int) -> tuple[int | None, str | None]:
    """How many tokens of the next pass are the prompt's if transformers is about to pass it together with candidates,
    None if all are; and why the cache cannot record, or None. caller: the frame that asks."""
    if caller.f_code is not _ASSISTED:
        ours = not caller.f_globals.get("__name__", "").startswith("transformers.generation")
        return None, None if ours else "this version of transformers does not say where the prompt ends"
    if seen:
        return None, f"transformers passes the whole prompt again, of which the cache has seen {seen} tokens"
    ids = caller.f_locals.get("input_ids")
    if not isinstance(ids, Tensor):
        return None, "this version of transformers does not say where the prompt ends"
    return ids.shape[1] or None, None
