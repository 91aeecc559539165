"""Attention masks of transformers models: padding, and checks that do not break graphs. Used by `plug` for both sides.
"""

from __future__ import annotations

from functools import cached_property
from typing import Any

import torch
import transformers
from torch import Tensor
from transformers.masking_utils import causal_mask_function, sdpa_mask

from .._validate import capturing

# With prefill_chunk_size on a cache that is not empty, older versions of transformers pass the tokens from 0 on again.
STARTS_AT_0 = tuple(int(part) for part in transformers.__version__.split(".")[:2]) < (5, 21)
_ADVICE = (
    "(transformers before 5.21 starts at 0 when prefill_chunk_size is used on a cache that is not empty: leave "
    "prefill_chunk_size out there)"
)


class MaskSpec:
    """The arguments of the mask function, instead of a mask. All layers of a forward pass share one object."""

    def __init__(self, **arguments: Any) -> None:
        self._arguments = arguments
        self._answers: dict[str, bool] = {}

    @cached_property
    def stock(self) -> Tensor | None:
        """The mask for transformers' sdpa attention, bool [B, 1, Q, KV]; None where it uses is_causal instead."""
        mask: Tensor | None = sdpa_mask(**self._arguments)
        return mask

    @property
    def given(self) -> Tensor | None:
        """The model's attention_mask, [B, T] bool, or None."""
        mask: Tensor | None = self._arguments["attention_mask"]
        return mask

    def occupied(self, seen: int, count: int) -> Tensor | None:
        """The new tokens that are not padding, [B, count] bool, or None without an attention_mask.

        seen: the number of earlier tokens. NotImplementedError for a mask that is not causal, ValueError for an
        attention_mask of the wrong length.
        """
        if self._arguments["mask_function"] is not causal_mask_function:
            raise NotImplementedError(
                "this model's mask is not the causal one (sliding, bidirectional, packed...): kvtwin's attention "
                "does not support it in a layer whose cache evicts"
            )
        mask = self.given
        if mask is None:
            return None
        if mask.dim() != 2 or mask.shape[1] != seen + count:
            raise ValueError(
                f"attention_mask must be [B, {seen + count}] for the {seen} tokens that the cache has seen and the "
                f"{count} new ones, got {tuple(mask.shape)}. {_ADVICE}"
            )
        return mask[:, seen:]

    def all(self, what: str, true: Tensor) -> bool:
        """Whether all elements of the bool tensor `true` are True.

        The result is stored under the name `what`, so that only the first layer of a forward pass synchronizes with the
        GPU.
        """
        if what not in self._answers:
            self._answers[what] = bool(true.all())
        return self._answers[what]


def readable(tensor: Tensor) -> bool:
    """Whether a tensor's elements can be read: not while a graph is compiled or captured."""
    return not torch.compiler.is_compiling() and not capturing(tensor.device)


def require(spec: MaskSpec, what: str, true: Tensor, message: str) -> None:
    """ValueError unless all elements of the bool tensor `true` are True. what: see `MaskSpec.all`.

    While a graph is compiled or captured, this becomes an assertion on the device: RuntimeError on the CPU; on CUDA the
    message is printed, and the next call that synchronizes fails. The message is a constant of such a graph, so it must
    not contain a number that changes.
    """
    if not readable(true):
        torch._assert_async(true.all(), message)
    elif not spec.all(what, true):
        raise ValueError(message)


def refuse_restart(spec: MaskSpec, position_ids: Tensor | None, mask: Tensor | None, seen: int) -> None:
    """ValueError if transformers passes tokens again that the cache has seen: their positions start at 0.

    If the model has a mask, `MaskSpec.occupied` detects this by its length, but transformers from 5.18 on drops masks
    of ones. position_ids: of the new tokens, [..., B or 1, Q]. mask: the cache's own [B, T] or None; a row that was all
    padding so far may start at 0.
    """
    if not STARTS_AT_0 or seen == 0 or position_ids is None or spec.given is not None or not readable(position_ids):
        return
    continues = position_ids[..., 0] > 0                                                  # [..., B or 1]
    if mask is not None:
        empty = ~mask[:, :seen].any(1).to(continues.device)
        continues = continues | empty.repeat_interleave(max(1, continues.shape[-1] // empty.shape[0]))
    if not spec.all("continues", continues):
        raise ValueError(f"the new tokens' positions start at 0, but the cache has seen {seen} tokens. {_ADVICE}")
