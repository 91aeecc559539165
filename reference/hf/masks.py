"""Attention masks of transformers models: padding, and checks that do not break graphs. Used by `cache_adapter` for
both sides.
"""

from __future__ import annotations

from functools import cached_property
from typing import Any

import torch
import transformers
from torch import Tensor
from transformers.masking_utils import causal_mask_function, eager_mask, sdpa_mask

from ..contract.arguments import capturing

# With prefill_chunk_size on a cache that is not empty, older versions of transformers pass the tokens from 0 on again.
STARTS_AT_0 = tuple(int(part) for part in transformers.__version__.split(".")[:2]) < (5, 21)


def _advice() -> str:
    """Why transformers may pass tokens again that the cache has seen, and what to do."""
    chunks = (
        "; transformers before 5.21 starts at 0 when prefill_chunk_size is used on a cache that is not empty: leave "
        "prefill_chunk_size out there"
    )
    return (
        "(generate passes all tokens again with use_cache=False: leave it out"
        f"{chunks if STARTS_AT_0 else ''})"
    )


class NoMask(NotImplementedError, AttributeError):
    """A model reads the mask in code of its own, but kvtwin's attention makes none."""


class MaskSpec:
    """The arguments of the mask function, instead of a mask. All layers of a forward pass share one object.

    If a prompt fills a static cache, `generate` makes this object ahead of the forward pass and passes it to the model,
    which passes it to `make_mask`. For both, it looks like a mask with 4 dimensions.
    """

    ndim = 4

    def __init__(self, **arguments: Any) -> None:
        self._arguments = arguments
        self._answers: dict[str, bool] = {}
        #: Whether this is made before the pass is compiled, as `generate` does; it then has a token's mask as a tensor
        #: of a fixed length.
        self.ahead = not torch.compiler.is_compiling()
        self._newest: Tensor | None = None
        if self.ahead and self.given is not None and arguments.get("q_length") == 1:
            self._newest = self.given[..., -1:].clone(memory_format=torch.contiguous_format)

    @cached_property
    def stock(self) -> Tensor | None:
        """The mask for transformers' sdpa attention, bool [B, 1, Q, KV]; None where it uses is_causal instead."""
        mask: Tensor | None = sdpa_mask(**self._arguments)
        return mask

    def additive(self, dtype: torch.dtype) -> Tensor:
        """The mask for a model's eager attention, [B, 1, Q, KV]: 0, or the lowest number where masked."""
        mask: Tensor = eager_mask(**{**self._arguments, "dtype": dtype})
        return mask

    @property
    def given(self) -> Tensor | None:
        """The model's attention_mask, [B, T] bool, or None."""
        mask: Tensor | None = self._arguments["attention_mask"]
        return mask

    def __getattr__(self, name: str) -> Any:
        """Called for attributes of a mask. Models read them that combine the mask with one of their own."""
        raise NoMask(
            f"this model reads the attention mask itself ({name}), before it calls the attention function: kvtwin's "
            "attention supports only models that pass the mask on, so call set_attn_implementation with another one"
        )

    def contiguous(self) -> MaskSpec:
        return self

    def occupied(self, seen: int | None, count: int, counted: Tensor | None = None) -> Tensor | None:
        """The new tokens that are not padding, [B, count] bool, or None without an attention_mask.

        seen: the number of earlier tokens; None in a compiled pass, where the tensor `counted` [1] has it.
        NotImplementedError for a mask that is not causal, ValueError for an attention_mask of the wrong length. A
        compiled pass checks the length on the device (see `require`), unless the mask was made ahead.
        """
        if self._arguments["mask_function"] is not causal_mask_function:
            raise NotImplementedError(
                "this model's mask is not the causal one (sliding, bidirectional, packed...): kvtwin's attention "
                "does not support it in a layer whose cache evicts"
            )
        ahead = seen is None and self.ahead and count == 1
        mask = self._newest if ahead else self.given
        if mask is None:
            return None
        total = mask.shape[-1] if seen is None else seen + count
        if mask.dim() != 2 or mask.shape[1] != total:
            raise ValueError(
                f"attention_mask must be [B, {total}] for the {total - count} tokens that the cache has seen and the "
                f"{count} new ones, got {tuple(mask.shape)}. {_advice()}"
            )
        if counted is not None and not ahead:
            require(self, "length", counted == total - count, "attention_mask has a wrong number of tokens")
        return mask[:, total - count:]

    def all(self, what: str, true: Tensor) -> bool:
        """Whether all elements of the bool tensor `true` are True.

        The result is stored under the name `what`, so that only the first layer of a forward pass synchronizes with the
        GPU.
        """
        if what not in self._answers:
            self._answers[what] = bool(true.all())
        return self._answers[what]


def make_mask(**arguments: Any) -> MaskSpec | Tensor | None:
    """The mask function "kvtwin": a MaskSpec, but transformers' sdpa mask for a static cache.

    `generate` makes the masks of a static cache ahead of the forward pass and needs tensors. The slots of such a cache
    outnumber its tokens, which transformers counts in a tensor from the second pass on.
    """
    made = arguments.get("attention_mask")
    if isinstance(made, MaskSpec):
        return made
    before = arguments.get("q_offset", 0)
    if isinstance(before, Tensor) or arguments["kv_length"] > before + arguments["q_length"]:
        mask: Tensor | None = sdpa_mask(**arguments)
        return mask
    return MaskSpec(**arguments)


def as_mask(attention_mask: object) -> Tensor | None:
    """Return an attention mask [B, T] as bool, or None."""
    if attention_mask is None:
        return None
    if not isinstance(attention_mask, Tensor):
        raise TypeError(f"attention_mask must be a torch.Tensor [B, T], got {type(attention_mask).__name__}")
    if attention_mask.dim() != 2 or attention_mask.is_floating_point() or attention_mask.is_complex():
        raise ValueError(
            "attention_mask must be [B, T] of bools or integers, 0 for padding, "
            f"got {tuple(attention_mask.shape)} of {attention_mask.dtype}"
        )
    return attention_mask.bool()


def readable(tensor: Tensor) -> bool:
    """Whether a tensor's elements can be read: not while a graph is compiled or captured."""
    return not torch.compiler.is_compiling() and not capturing(tensor.device)


def require(spec: MaskSpec, what: str, true: Tensor, message: str) -> None:
    """ValueError unless all elements of the bool tensor `true` are True. what: see `MaskSpec.all`.

    While a graph is compiled or captured, this becomes an assertion on the device, once for each pass: RuntimeError on
    the CPU; on CUDA the message is printed, and the next call that synchronizes fails. The message is a constant of the
    graph, so it must not contain a number that changes.
    """
    if not readable(true):
        if what not in spec._answers:
            torch._assert_async(true.all(), message)
            spec._answers[what] = True
    elif not spec.all(what, true):
        raise ValueError(message)


def none_is_padding(spec: MaskSpec, occupied: Tensor | None) -> bool:
    """Whether a pass of one token can be a step, because its tokens, occupied [B, 1], are padding in no row.

    `generate` adds only tokens that are not: its compiled passes check this as `require` does. Other compiled passes
    must do without the answer.
    """
    if occupied is None or readable(occupied):
        return occupied is None or spec.all("tokens", occupied)
    if not (spec.ahead and torch.compiler.is_compiling()):
        return False
    require(spec, "tokens", occupied, "a compiled step of generate has padding: call it with disable_compile=True")
    return True


def spec_of(mask: object, own: Tensor | None) -> MaskSpec:
    """The mask of a pass as a MaskSpec; without a mask from the model, one for the cache's own, if it has one."""
    if isinstance(mask, MaskSpec):
        return mask
    if mask is None and own is not None:
        return MaskSpec(mask_function=causal_mask_function, attention_mask=None)
    what = "no mask" if mask is None else f"a mask of its own ({type(mask).__name__})"
    raise NotImplementedError(
        f"the model passed {what} to attention: an evicting cache needs the padding as attention_mask [B, T]"
    )


def new_tokens(
    spec: MaskSpec, own: Tensor | None, key: Tensor, seen: int | None, counted: Tensor | None
) -> Tensor | None:
    """The new tokens that are not padding, [B, Q] bool, by the masks of the model and of the cache; None without one.

    own: the cache's mask [B, T]; seen, counted: as in `MaskSpec.occupied`. ValueError if the masks differ.
    """
    batch, _, count, _ = key.shape
    given = spec.occupied(seen, count, counted)
    given = None if given is None else given.to(key.device)
    if own is None or (seen is not None and own.shape[1] <= seen):
        return given
    rows, total = own.shape
    if batch % rows or (seen == 0 and total < count):
        raise ValueError(
            f"the cache's attention_mask must be [B, T] with B = {batch} (or a divisor, for beams) and T at least "
            f"{count}, got {(rows, total)}"
        )
    own = own.to(key.device)
    if seen is None:
        assert counted is not None
        place = torch.arange(count, device=key.device) + counted
        own = torch.nn.functional.pad(own, (0, 1), value=True).index_select(1, place.clamp(max=total))
    else:
        own = own[:, seen:seen + count]
        own = torch.nn.functional.pad(own, (0, count - own.shape[1]), value=True)
    own = own.repeat_interleave(batch // rows, dim=0)
    if given is not None:
        require(spec, "same", own == given, "the attention_mask given to the cache differs from the model's")
    return own


def refuse_restart(spec: MaskSpec, position_ids: Tensor | None, mask: Tensor | None, seen: int) -> None:
    """ValueError if transformers passes tokens again that the cache has seen: their positions start at 0.

    If the model has a mask, `MaskSpec.occupied` detects this by its length, but transformers from 5.18 on drops masks
    of ones. position_ids: of the new tokens, [..., B or 1, Q]. mask: the cache's own [B, T] or None; a row that was all
    padding so far may start at 0. Single tokens are decode steps, which only older versions of transformers require to
    be checked: reading a position synchronizes with the GPU.
    """
    if seen == 0 or position_ids is None or spec.given is not None:
        return
    if not (STARTS_AT_0 or position_ids.shape[-1] > 1) or not readable(position_ids):
        return
    continues = position_ids[..., 0] > 0                                                  # [..., B or 1]
    if continues.dim() > 1:                         # positions with several axes, of which one may stay 0 in an image
        continues = continues.flatten(0, -2).any(0)
    if mask is not None:
        empty = ~mask[:, :seen].any(1).to(continues.device)
        continues = continues | empty.repeat_interleave(max(1, continues.shape[-1] // empty.shape[0]))
    if not spec.all("continues", continues):
        raise ValueError(f"the new tokens' positions start at 0, but the cache has seen {seen} tokens. {_advice()}")


def no_padding(mask: object, position_ids: Tensor | None, own: Tensor | None, seen: int) -> bool | Tensor | None:
    """Whether no row's next token, after `seen` tokens, is padding; None for a mask that this cannot be read from.

    mask: the model's attention_mask, a MaskSpec or None. own: the cache's own mask. The answer to a mask is a bool
    tensor [], which the device computes while the host goes on. ValueError as in `refuse_restart`.
    """
    if isinstance(mask, dict) and len(mask) == 1:           # one for all layers, as `generate` makes them ahead
        mask = next(iter(mask.values()))
    if isinstance(mask, MaskSpec):
        mask = mask.given
    if mask is None:
        if STARTS_AT_0:
            refuse_restart(MaskSpec(attention_mask=None), position_ids, own, seen)
        return True
    if not isinstance(mask, Tensor) or mask.dim() != 2 or mask.shape[1] != seen + 1:
        return None
    return mask[:, -1].all()
