"""KeyDiff on the GPU: keys are read twice, once for the sum of their directions and once for the ranks against it.

Selection is a radix search on the bits of the ranks, and what stays is gathered in order; nothing returns to the host.
At decode the sum is carried along, and one pass over the keys ranks them and puts the newest in the victim's place.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
from torch import Tensor

from ..reference._validate import capturing, check_choice, check_dtype, check_integer, check_tensor
from ..reference._validate_attention import check_key_value, check_slot_mask
from ..reference.contract import Sizes
from ..reference.keydiff import EvictResult, KeyDiffConfig
from ._blocks import Block, BlockState
from ._keydiff_anchors import ANCHORS, SIMILARITIES, any_rank, any_score, over_length, sortable
from ._keydiff_kernels import anchor_kernel, rank_kernel
from ._keydiff_select import select
from ._keydiff_step import lengths, scratch, step, warps_of
from ._launch import (
    INTERPRETED, check_kernel_sizes, check_launchable, key_block, multiprocessors, on_device_of, padded_head_dim,
    stride_unit,
)

__all__ = ["EvictResult", "KeyDiffConfig", "KeyDiffState", "evict", "pairwise_score", "score"]

DEFAULT = ("mean_normalized", "cosine")

#: Programs per multiprocessor that share the keys, and how many tiles are on their way to one: to sum them, and to rank
#: them. A pass that ranks takes two tiles at a time.
PROGRAMS = 16
ANCHOR_STAGES, RANK_STAGES = 3, 1
#: The most programs that share a row.
MAX_SPLITS = 128


def score(
    key: Tensor, *, occupied: Tensor | None = None, anchor: str = "mean_normalized", similarity: str = "cosine"
) -> Tensor:
    """How far each key is from the anchor of its head (KeyDiff eq. 8): [B, Hkv, S] float32, higher = keep.

    key [B, Hkv, S, D], any strides; occupied [B, S] or [B, Hkv, S] bool, default all. Unoccupied slots are -inf.
    float32, float16 or bfloat16; D from 16 to 256. Semantics: `kvtwin.reference.keydiff.score`.
    TypeError, ValueError for arguments that do not fit, for inputs that require grad, and for CPU tensors outside
    Triton's interpreter.
    """
    _check_keys(key, occupied)
    _check_options(anchor, similarity)
    if (anchor, similarity) != DEFAULT:
        return any_score(key, _per_head(occupied, key), anchor, similarity)
    direction, inverse = _anchor(key, occupied)
    return _cosine(_rank(key, occupied, direction, inverse), direction, occupied)


def pairwise_score(key: Tensor, *, occupied: Tensor | None = None) -> Tensor:
    """-sum_j CosSim(k_i, k_j) over the occupied slots (eq. 7): [B, Hkv, S]. In O(S): the sum over j is taken first.

    Arguments as in `score`. Semantics: `kvtwin.reference.keydiff.pairwise_score`.
    """
    _check_keys(key, occupied)
    rank: Tensor = _rank(key, occupied, *_anchor(key, occupied))
    return rank


def evict(
    key: Tensor, value: Tensor, budget: int, *, occupied: Tensor | None = None, recent: int = 0,
    protected: Tensor | None = None, anchor: str = "mean_normalized", similarity: str = "cosine",
) -> EvictResult:
    """Keep the `budget` tokens of each head that score highest; ties: the lowest slot goes.

    key, value [B, Hkv, S, D], any strides; occupied, protected [B, S] or [B, Hkv, S] bool, default all and none.
    Semantics: `kvtwin.reference.keydiff.evict`. No synchronisation, but for the check that `protected` and `recent` do
    not exceed the budget, where `protected` is given; it is left out while a CUDA graph captures, and under
    torch.compile: then the lowest slots of them go.
    """
    check_key_value(key, value)
    check_integer("budget", budget, minimum=1)
    if check_integer("recent", recent, minimum=0) > budget:
        raise ValueError(f"recent must be at most budget = {budget}, got {recent}")
    _check_keys(key, occupied)
    check_launchable(value=value)
    _check_options(anchor, similarity)
    if protected is not None:
        _check_slots("protected", protected, key)
    shielded = _shielded(key, occupied, recent, protected, budget)
    own = (anchor, similarity) == DEFAULT
    if own:
        code, histograms = _codes(key, occupied, shielded)
    else:
        code = _any_codes(key, _per_head(occupied, key), shielded, anchor, similarity)
        histograms = code.new_zeros((*code.shape[:2], 4, 256))
    return EvictResult(*select(key, value, code, histograms, min(budget, key.shape[2]), own))


class KeyDiffState(BlockState):
    """A KeyDiff cache. `score` is `score` of the tokens held before the last eviction, and moves with its token: it is
    computed when asked for, from the anchor of then, since to store it would cost a step 4 %.

    A block's anchor is summed from scratch. A step adds the new normalised key to the anchor that it finds, ranks, and
    subtracts the victim's. Every config.refresh steps a step, which reads the keys anyway, sums them anew for the next
    one; steps are counted on the device, per head, so that a CUDA graph's replays do the same. Other anchors and
    similarities than the default ones are computed anew at every step, by plain torch operations.
    """

    Config = KeyDiffConfig

    def _allocate(self) -> None:
        batch, _, heads, slots, head_dim = self.sizes
        self._recent = self.config.recent
        # Of the default anchor: the sum of the normalised keys held, the one that was ranked against last, steps since
        # it was summed anew, inverse lengths.
        self._anchor, self._ranked = (self._buffer(batch, heads, head_dim, dtype=torch.float32) for _ in range(2))
        self._age = self._buffer(batch, heads, dtype=torch.int32)
        self._carried = self._buffer(batch, heads, slots, dtype=torch.float32)
        with torch.inference_mode(False):
            self._between = scratch(self.key, self.config.budget)

    def _buffers(self) -> tuple[Tensor, ...]:
        return self._anchor, self._age, self._ranked

    def _clear(self) -> None:
        self._anchor.zero_()
        self._age.zero_()
        self._ranked.zero_()
        self._between[2].zero_()                                                # should a launch have been cut short

    @property
    def _follows(self) -> bool:
        """Whether the anchor is carried from step to step."""
        return (self.config.anchor, self.config.similarity) == DEFAULT

    @property
    def score(self) -> Tensor:
        if not self._follows:
            return self._score
        assert self._carried is not None
        return _cosine(_rank(self.key, self.occupied, self._ranked, self._carried), self._ranked, self.occupied)

    def append_block(self, query: Tensor, key: Tensor, value: Tensor, occupied: Tensor | None = None) -> Tensor:
        """Any number of tokens, at most block_size at a time: see `BlockState.append_block`."""
        output = super().append_block(query, key, value, occupied)
        if self._follows:
            budget = self.config.budget
            self._anchor.copy_(_anchor(self.key[:, :, :budget], self.occupied[..., :budget])[0])
            self._age.zero_()
        return output

    def _evict(self, block: Block, count: int) -> None:
        if block.parts is None and self._follows:
            self._replace()
        else:
            super()._evict(block, count)

    def _replace(self) -> None:
        """The eviction of a decode step: its token is in slot `budget`."""
        step(
            self.key, self.value, self.occupied, self.positions, self._ordinals, self._carried, self._held,
            self._anchor, self._ranked, self._age, *self._between, self.config.budget, self.config.refresh,
            self.config.recent,
        )

    def _update(self, block: Block) -> tuple[Tensor, None]:
        end = block.end
        key, occupied = self.key[:, :, :end], self.occupied[..., :end]
        if self._follows:
            assert self._carried is not None
            lengths(self.key, self._carried, self.config.budget, end)
            self._ranked.copy_(_anchor(key, occupied)[0])
            return _rank(key, occupied, self._ranked, self._carried[..., :end]), None
        options = self.config.anchor, self.config.similarity
        self._score[..., :end] = any_score(key, occupied, *options)
        return any_rank(key, occupied, *options), None


# Arguments -----------------------------------------------------------------------------------------------------------


def _check_keys(key: object, occupied: object) -> None:
    """key [B, Hkv, S, D] for a kernel; occupied None, [B, S] or [B, Hkv, S] bool."""
    key = check_tensor("key", key, dims=4, layout="[B, Hkv, S, D]")
    check_dtype("key.dtype", key.dtype)
    check_launchable(key=key)
    check_kernel_sizes(_sizes(key))
    if occupied is not None:
        _check_slots("occupied", occupied, key)


def _check_slots(name: str, mask: object, key: Tensor) -> None:
    check_slot_mask(name, mask, _sizes(key), isinstance(mask, Tensor) and mask.dim() == 3, key)


def _check_options(anchor: object, similarity: object) -> None:
    check_choice("anchor", anchor, ANCHORS)
    check_choice("similarity", similarity, SIMILARITIES)


def _sizes(key: Tensor) -> Sizes:
    batch, heads, slots, head_dim = key.shape
    return Sizes(batch, heads, heads, slots, head_dim)


def _per_head(mask: Tensor | None, key: Tensor) -> Tensor:
    """A mask of key's slots as [B, Hkv, S], all True for None."""
    if mask is None:
        return torch.ones((), dtype=torch.bool, device=key.device).expand(key.shape[:3])
    return (mask if mask.dim() == 3 else mask[:, None]).expand(key.shape[:3])


def _shielded(
    key: Tensor, occupied: Tensor | None, recent: int, protected: Tensor | None, budget: int
) -> Tensor | None:
    """The tokens that stay in any case, [B, Hkv, S] bool (it may be True for unoccupied slots), or None."""
    slots = key.shape[2]
    shielded = None if protected is None else _per_head(protected, key)
    if recent:
        if occupied is None:
            last = (torch.arange(slots, device=key.device) >= slots - recent).expand(key.shape[:3])
        else:
            last = _per_head(occupied.flip(-1).cumsum(-1).flip(-1) <= recent, key)
        shielded = last if shielded is None else shielded | last
    if protected is not None and not torch.compiler.is_compiling() and not capturing(key.device):
        assert shielded is not None
        most = int((shielded & _per_head(occupied, key)).sum(-1).max())
        if most > budget:
            raise ValueError(
                f"protected must leave, with the recent tokens, at most budget = {budget} tokens per head that stay in "
                f"any case, got {most}"
            )
    return shielded


def _cosine(rank: Tensor, direction: Tensor, occupied: Tensor | None) -> Tensor:
    """Ranks against a sum of normalised keys [B, Hkv, D] as cosines with it; 0 if that is zero."""
    cosine = over_length(rank, direction)
    return cosine if occupied is None else cosine.masked_fill(~_per_head(occupied, rank[..., None]), -torch.inf)


def _any_codes(key: Tensor, occupied: Tensor, shielded: Tensor | None, anchor: str, similarity: str) -> Tensor:
    """As `_codes`, for any anchor and similarity."""
    code = sortable(any_rank(key, occupied, anchor, similarity))
    if shielded is not None:
        code = code.masked_fill(shielded, 2**31 - 1)
    return code.masked_fill(~occupied, -(2**31))


# Operations ----------------------------------------------------------------------------------------------------------


def _split(rows: int, slots: int, block: int, device: torch.device) -> tuple[int, int]:
    """How many programs share one row's slots, and how many slots each takes (a multiple of `block`)."""
    tiles = triton.cdiv(slots, block)
    wanted = 2 if INTERPRETED else triton.cdiv(PROGRAMS * multiprocessors(device), rows)
    each = triton.cdiv(tiles, min(wanted, tiles, MAX_SPLITS))
    return triton.cdiv(tiles, each), each * block


def _shape(key: Tensor, occupied: Tensor | None, tiles: int) -> tuple[tuple[int, int, int, int], dict[str, Any]]:
    """slots, slots per program, programs per row and heads of a pass over the keys, `tiles` at a time; and its
    constants."""
    batch, heads, slots, head_dim = key.shape
    block = key_block(head_dim, key.element_size(), slots) * (1 if INTERPRETED else tiles)
    splits, split_size = _split(batch * heads, slots, block, key.device)
    return (slots, split_size, splits, heads), {
        "HEAD_DIM": head_dim, "D_PAD": padded_head_dim(head_dim), "BLOCK": block, "UNIT": stride_unit(key),
        "OCCUPIED": occupied is not None, "MASKED": occupied is not None or slots < block, "num_warps": warps_of(block),
    }


def _key_strides(key: Tensor, unit: int) -> tuple[int, ...]:
    return (*(stride // unit for stride in key.stride()[:3]), key.stride(3))


def _mask_strides(mask: Tensor | None) -> tuple[int, int, int]:
    """Of a mask [B, S] or [B, Hkv, S], by row, head and slot."""
    if mask is None:
        return 0, 0, 0
    return mask.stride(0), mask.stride(1) if mask.dim() == 3 else 0, mask.stride(-1)


def _launch_anchor(key: Tensor, occupied: Tensor | None, arrivals: Tensor) -> tuple[Tensor, Tensor]:
    """As `_anchor`; arrivals [B * Hkv] int32, zero."""
    batch, heads, slots, head_dim = key.shape
    sizes, shape = _shape(key, occupied, 1)
    anchor = torch.empty(batch, heads, head_dim, dtype=torch.float32, device=key.device)
    inverse = torch.empty(batch, heads, slots, dtype=torch.float32, device=key.device)
    partial = torch.empty(batch * heads, sizes[2], shape["D_PAD"], dtype=torch.float32, device=key.device)
    with on_device_of(key):
        anchor_kernel[(batch * heads * sizes[2],)](
            key, occupied, inverse, partial, anchor, arrivals, *sizes,
            *_key_strides(key, shape["UNIT"]), *_mask_strides(occupied), **shape, STAGES=ANCHOR_STAGES,
        )
    return anchor, inverse


def _launch_ranks(
    key: Tensor, occupied: Tensor | None, protected: Tensor | None, inverse: Tensor, anchor: Tensor, result: Tensor,
    histograms: Tensor | None,
) -> None:
    sizes, shape = _shape(key, occupied, 2)
    with on_device_of(key):
        rank_kernel[(key.shape[0] * key.shape[1] * sizes[2],)](
            key, occupied, protected, inverse, anchor, result, histograms, *sizes,
            *_key_strides(key, shape["UNIT"]), *_mask_strides(occupied), *inverse.stride()[:2],
            *_mask_strides(protected), **shape, STAGES=RANK_STAGES, PROTECTED=protected is not None,
            CODES=histograms is not None, CHUNK=64 if INTERPRETED else 1024,
        )


@torch.library.custom_op("kvtwin::keydiff_anchor", mutates_args=())
def _anchor(key: Tensor, occupied: Tensor | None) -> tuple[Tensor, Tensor]:
    """The sum of the normalised keys in occupied slots, [B, Hkv, D] float32, and inverse lengths of all keys,
    [B, Hkv, S]: negative where not to be trusted (see `_keydiff_step.lengths`), 0 where unoccupied."""
    return _launch_anchor(key, occupied, torch.zeros(key.shape[0] * key.shape[1], dtype=torch.int32, device=key.device))


@_anchor.register_fake
def _(key: Tensor, occupied: Tensor | None) -> tuple[Tensor, Tensor]:
    anchor = key.new_empty((*key.shape[:2], key.shape[3]), dtype=torch.float32)
    return anchor, key.new_empty(key.shape[:3], dtype=torch.float32)


@torch.library.custom_op("kvtwin::keydiff_rank", mutates_args=())
def _rank(key: Tensor, occupied: Tensor | None, anchor: Tensor, inverse: Tensor) -> Tensor:
    """-k_hat . anchor [B, Hkv, S] float32, anchor [B, Hkv, D], inverse lengths [B, Hkv, S]; -inf where unoccupied."""
    result = torch.empty(key.shape[:3], dtype=torch.float32, device=key.device)
    _launch_ranks(key, occupied, None, inverse, anchor, result, None)
    return result


@_rank.register_fake
def _(key: Tensor, occupied: Tensor | None, anchor: Tensor, inverse: Tensor) -> Tensor:
    return key.new_empty(key.shape[:3], dtype=torch.float32)


@torch.library.custom_op("kvtwin::keydiff_codes", mutates_args=())
def _codes(key: Tensor, occupied: Tensor | None, protected: Tensor | None) -> tuple[Tensor, Tensor]:
    """Ranks as int32 in the same order, to 31 bits of the cosine, [B, Hkv, S]: the largest number where protected, the
    least where unoccupied. And int32 [B, Hkv, 4, 256]: the histogram of their first 8 bits, and three times zeros."""
    batch, heads, slots, _ = key.shape
    rows = batch * heads
    zeros = torch.zeros(rows * 1024 + rows, dtype=torch.int32, device=key.device)
    histograms = zeros[:rows * 1024].view(batch, heads, 4, 256)
    anchor, inverse = _launch_anchor(key, occupied, zeros[rows * 1024:])
    result = torch.empty(batch, heads, slots, dtype=torch.int32, device=key.device)
    _launch_ranks(key, occupied, protected, inverse, anchor, result, histograms)
    return result, histograms


@_codes.register_fake
def _(key: Tensor, occupied: Tensor | None, protected: Tensor | None) -> tuple[Tensor, Tensor]:
    return key.new_empty(key.shape[:3], dtype=torch.int32), key.new_empty((*key.shape[:2], 4, 256), dtype=torch.int32)
