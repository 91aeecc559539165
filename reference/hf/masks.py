"""What the model was told about padding, and what may be asked of it. Both sides' caches use this, by way of `plug`."""

from __future__ import annotations

from functools import cached_property
from typing import Any

import torch
import transformers
from torch import Tensor
from transformers.masking_utils import causal_mask_function, sdpa_mask

from .._validate import capturing

# With prefill_chunk_size on a cache that is not empty, transformers up to 5.20 feeds the tokens from 0 on once more.
STARTS_AT_0 = tuple(int(part) for part in transformers.__version__.split(".")[:2]) < (5, 22)
_ADVICE = (
    "(transformers before 5.22 starts at 0 when prefill_chunk_size is used on a cache that is not empty: leave "
    "prefill_chunk_size out there)"
)


class MaskSpec:
    """What the mask function was asked for, in place of a mask. One object serves all layers of a forward pass."""

    def __init__(self, **arguments: Any) -> None:
        self._arguments = arguments
        self._answers: dict[str, bool] = {}

    @cached_property
    def stock(self) -> Tensor | None:
        """The mask of transformers' sdpa attention, bool [B, 1, Q, KV]; None where it uses is_causal."""
        mask: Tensor | None = sdpa_mask(**self._arguments)
        return mask

    @property
    def given(self) -> Tensor | None:
        """The model's attention_mask, [B, T] bool, if it had one."""
        mask: Tensor | None = self._arguments["attention_mask"]
        return mask

    def occupied(self, seen: int, count: int) -> Tensor | None:
        """Which of the `count` new tokens are no padding, [B, count] bool; None if there is no mask.

        Raises NotImplementedError for masks that are not causal, ValueError where the mask's length is wrong.
        """
        if self._arguments["mask_function"] is not causal_mask_function:
            raise NotImplementedError(
                "this model's mask is not the causal one (sliding, bidirectional, packed...): kvtwin's attention "
                "would not heed it in a layer whose cache evicts"
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
        """Whether all of `true` is, a bool tensor: read for the first layer that asks for `what`, which makes it one
        synchronisation with the GPU per forward pass, not layer."""
        if what not in self._answers:
            self._answers[what] = bool(true.all())
        return self._answers[what]


def readable(tensor: Tensor) -> bool:
    """Whether a tensor's values can be looked at: not while a graph is traced or captured."""
    return not torch.compiler.is_compiling() and not capturing(tensor.device)


def require(spec: MaskSpec, what: str, true: Tensor, message: str) -> None:
    """ValueError unless all of `true` is, a bool tensor.

    A graph that is compiled or captured cannot look; there it is an assertion on the device: RuntimeError on the CPU;
    on CUDA the message is printed, and the next call that synchronises fails. The message is part of such a graph: a
    number in it that changes would make another one.
    """
    if not readable(true):
        torch._assert_async(true.all(), message)
    elif not spec.all(what, true):
        raise ValueError(message)


def refuse_restart(spec: MaskSpec, position_ids: Tensor | None, mask: Tensor | None, seen: int) -> None:
    """ValueError where transformers feeds tokens once more that the cache has seen: their positions start at 0.

    Where the model has a mask its length tells this (`MaskSpec.occupied`), but transformers from 5.18 on drops masks of
    nothing but ones. position_ids: the new tokens', [..., B or 1, Q]. mask: the cache's own [B, T], if any: a row of
    nothing but padding so far may start at 0.
    """
    if not STARTS_AT_0 or seen == 0 or position_ids is None or spec.given is not None or not readable(position_ids):
        return
    goes_on = position_ids[..., 0] > 0                                                  # [..., B or 1]
    if mask is not None:
        empty = ~mask[:, :seen].any(1).to(goes_on.device)
        goes_on = goes_on | empty.repeat_interleave(max(1, goes_on.shape[-1] // empty.shape[0]))
    if not spec.all("goes on", goes_on):
        raise ValueError(f"the new tokens' positions start at 0, but the cache has seen {seen} tokens. {_ADVICE}")
