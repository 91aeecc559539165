"""Quest on the GPU: the bounds of pages, their scores, the selection, and a decode step in four launches.

Nothing synchronises with the host, so a captured step can be replayed as any step.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ...reference.baselines.quest import PageBoundsResult, QuestConfig
from ...reference.contract.quest import check_page_bounds, check_page_scores, check_select_pages
from .._common.growing_state import GrowingState
from .._common.launch import (
    INTERPRETED,
    MAX_GROUP,
    PTX,
    SMALL_TILES,
    cdiv,
    check_launchable,
    group_rows,
    key_block,
    next_power_of_2,
    on_device_of,
    padded_head_dim,
    split_slots,
)
from .._common.numerics import LOG2_E
from .._common.operation import operation
from .quest_kernels import attention_kernel, bounds_kernel, merge_kernel, score_kernel, select_kernel

__all__ = ["PageBoundsResult", "QuestConfig", "QuestState", "page_bounds", "page_scores", "select_pages"]

#: A program of the selection passes over so many pages at a time. It keeps the codes of up to twice as many.
CHUNK = 16 if SMALL_TILES else 8192
#: Registers of each of its threads, so that a multiprocessor has two programs.
REGISTERS = 128
#: Elements of a tile of bounds.
TILE = 8192


def page_bounds(key: Tensor, *, page_size: int) -> PageBoundsResult:
    """The largest and the smallest key of each page and channel. key [B, Hkv, T, D], any strides.

    Semantics, bitwise: the reference's `page_bounds`, in float32, float16 or bfloat16. TypeError or ValueError for
    invalid arguments, for inputs that require grad, and for CPU tensors outside Triton's interpreter.
    """
    key, page_size = check_page_bounds(key, page_size)
    check_launchable(key=key)
    return PageBoundsResult(*_page_bounds(key, page_size))


def page_scores(query: Tensor, maximum: Tensor, minimum: Tensor) -> Tensor:
    """The upper bounds of the logits of each page, not scaled: [B, Hq, pages] float32. Any strides.

    Semantics: the reference's `page_scores`, in float32, float16 or bfloat16; up to 16 query heads per KV head. Errors
    as in `page_bounds`.
    """
    query, maximum, minimum = check_page_scores(query, maximum, minimum)
    check_launchable(query=query, maximum=maximum, minimum=minimum)
    if query.shape[1] > MAX_GROUP * maximum.shape[1]:
        raise ValueError(
            f"query heads per KV head must be at most {MAX_GROUP}, got Hq = {query.shape[1]}, Hkv = {maximum.shape[1]}"
        )
    score: Tensor = _page_scores(query, maximum, minimum)
    return score


def select_pages(score: Tensor, count: Tensor, *, k: int, keep_last: bool = True) -> Tensor:
    """The pages with the highest scores: [B, Hq, k] int64, ascending, then -1. Any strides.

    Semantics, exactly: the reference's `select_pages`, in float32, float16 or bfloat16. Errors as in `page_bounds`.
    """
    score, count, k, keep_last = check_select_pages(score, count, k, keep_last)
    check_launchable(score=score, count=count)
    selected: Tensor = _select_pages(score, count, k, keep_last)
    return selected


# Operations ----------------------------------------------------------------------------------------------------------


def _empty_bounds(key: Tensor, size: int) -> tuple[Tensor, Tensor]:
    batch, heads, tokens, head_dim = key.shape
    shape = (batch, heads, -(-tokens // size), head_dim)
    return key.new_empty(shape), key.new_empty(shape)


@operation("kvtwin::quest_bounds", mutates_args=())
def _page_bounds(key: Tensor, size: int) -> tuple[Tensor, Tensor]:
    maximum, minimum = _empty_bounds(key, size)
    _bounds(key, None, maximum, minimum, size, key.shape[2])
    return maximum, minimum


@_page_bounds.register_fake
def _(key: Tensor, size: int) -> tuple[Tensor, Tensor]:
    return _empty_bounds(key, size)


@operation("kvtwin::quest_fill", mutates_args=("maximum", "minimum"))
def _fill(key: Tensor, count: Tensor, maximum: Tensor, minimum: Tensor, size: int, tokens: int) -> None:
    """The bounds of the pages of a prompt: row b has count[b] of at most `tokens` tokens, in its first slots."""
    _bounds(key, count, maximum, minimum, size, tokens)


def _bounds(key: Tensor, count: Tensor | None, maximum: Tensor, minimum: Tensor, size: int, tokens: int) -> None:
    batch, heads, _, head_dim = key.shape
    size = min(size, tokens)                                    # a program loops over all places of a page
    pages = -(-tokens // size)
    block = 4 if SMALL_TILES else max(1, TILE // padded_head_dim(head_dim) // 2)
    tiles = cdiv(pages, block)
    if not batch * heads * tiles * head_dim:
        return
    with on_device_of(key):
        bounds_kernel[(batch * heads * tiles,)](
            key, key if count is None else count, maximum, minimum, heads, tiles, tokens, maximum.shape[2], size,
            *key.stride(), HEAD_DIM=head_dim, D_PAD=padded_head_dim(head_dim), PAGES=block,
            COUNTED=count is not None, num_warps=4,
        )


def _empty_scores(query: Tensor, maximum: Tensor) -> Tensor:
    return query.new_empty((*query.shape[:2], maximum.shape[2]), dtype=torch.float32)


def _page_block(head_dim: int, itemsize: int, pages: int) -> int:
    """Pages of a program that scores them. `dot` needs 16."""
    return 16 if SMALL_TILES else key_block(head_dim, itemsize, pages)


@operation("kvtwin::quest_scores", mutates_args=())
def _page_scores(query: Tensor, maximum: Tensor, minimum: Tensor) -> Tensor:
    maximum, minimum = maximum.contiguous(), minimum.contiguous()
    (batch, heads, pages, head_dim), query_heads = maximum.shape, query.shape[1]
    score = _empty_scores(query, maximum)
    block = _page_block(head_dim, query.element_size(), pages)
    tiles = cdiv(pages, block)
    if not score.numel():
        return score
    with on_device_of(query):
        score_kernel[(batch * heads * tiles,)](
            query, query, query, query, query, maximum, minimum, score, query, query, query, query,
            heads, tiles, pages, 0, 1, *query.stride(), 0, 0, 0, 0, 0, 0,
            GROUP=query_heads // heads, HEAD_DIM=head_dim, D_PAD=padded_head_dim(head_dim),
            ROWS=group_rows(query_heads // heads, query.dtype),
            PAGES=block, STEP=False, SCORES=True, ROUND=False, num_warps=4,
        )
    return score


@_page_scores.register_fake
def _(query: Tensor, maximum: Tensor) -> Tensor:
    return _empty_scores(query, maximum)


@operation("kvtwin::quest_select", mutates_args=())
def _select_pages(score: Tensor, count: Tensor, k: int, keep_last: bool) -> Tensor:
    batch, heads, _ = score.shape
    score, count = score.contiguous(), count.contiguous()
    selected = torch.empty(batch, heads, k, dtype=torch.int32, device=score.device)
    _select(score, count, selected, keep_last)
    return selected.long()


@_select_pages.register_fake
def _(score: Tensor, k: int) -> Tensor:
    return score.new_empty((*score.shape[:2], k), dtype=torch.int64)


def _select(scores: Tensor, pages_now: Tensor, selected: Tensor, keep_last: bool) -> None:
    """Launch `select_kernel` for scores [B, Hq, room]."""
    batch, query_heads, room = scores.shape
    wanted = selected.shape[2]
    if not selected.numel():
        return
    # With the rest in a tensor of its own, there may be far fewer codes than the next power of two.
    chunk = min(max(16, next_power_of_2(room + 1) // 2), CHUNK)
    warps = 4 if chunk <= 1024 else 8
    rest = min(max(32 * warps, next_power_of_2(max(1, room - chunk))), chunk)
    with on_device_of(scores):
        select_kernel[(batch * query_heads,)](
            scores, pages_now, selected, query_heads, room, wanted,
            CHUNK=chunk, REST=rest, LIST=min(1024, next_power_of_2(wanted)), KEEP_LAST=keep_last,
            WHOLE=room <= chunk + rest, num_warps=warps, **({"maxnreg": REGISTERS} if PTX and warps == 8 else {}),
        )


@operation(
    "kvtwin::quest_step",
    mutates_args=(
        "key", "value", "maximum", "minimum", "scores", "selected", "count", "counters", "positions", "pages_now",
        "partial", "row_maxima", "weight_sums",
    ),
)
def _step(
    query: Tensor, new_key: Tensor, new_value: Tensor, key: Tensor, value: Tensor, maximum: Tensor, minimum: Tensor,
    scores: Tensor, selected: Tensor, count: Tensor, counters: Tensor, positions: Tensor, pages_now: Tensor,
    partial: Tensor, row_maxima: Tensor, weight_sums: Tensor, scale: float, size: int, keep_last: bool,
    round_scores: bool, splits: int,
) -> Tensor:
    """One step: stores the token, scores and selects pages, attends, and counts the token. If `selected` has room for
    all pages, it is not written, and all query heads attend to all tokens."""
    (batch, query_heads, head_dim), (_, heads, slots, _) = query.shape, key.shape
    room = maximum.shape[2]
    group, some = query_heads // heads, selected.shape[2] < room
    block = _page_block(head_dim, query.element_size(), room)
    tiles = cdiv(room, block) if some else 1
    with on_device_of(query):
        score_kernel[(batch * heads * tiles,)](
            query, new_key, new_value, key, value, maximum, minimum, scores, count, counters, positions, pages_now,
            heads, tiles, room, slots, size, *query.stride(), *new_key.stride(), *new_value.stride(),
            GROUP=group, ROWS=group_rows(group, query.dtype), HEAD_DIM=head_dim, D_PAD=padded_head_dim(head_dim),
            PAGES=block, STEP=True, SCORES=some, ROUND=round_scores, num_warps=4,
        )
    if some:
        _select(scores, pages_now, selected, keep_last)
    return _attend(
        query, key, value, selected, count, counters, pages_now, partial, row_maxima, weight_sums, scale, size, splits,
        some,
    )


def _attend(
    query: Tensor, key: Tensor, value: Tensor, selected: Tensor, count: Tensor, counters: Tensor, pages_now: Tensor,
    partial: Tensor, row_maxima: Tensor, weight_sums: Tensor, scale: float, size: int, splits: int, some: bool,
) -> Tensor:
    """Attend to the selected pages, or to all tokens if not `some`, and count the token."""
    (batch, query_heads, head_dim), (_, heads, slots, _), wanted = query.shape, key.shape, selected.shape[2]
    group = query_heads // heads
    output = torch.empty(query.shape, dtype=query.dtype, device=query.device)
    shape = {"HEAD_DIM": head_dim, "D_PAD": padded_head_dim(head_dim)}
    block, each = _tile(head_dim, query.element_size(), slots, group, some)
    with on_device_of(query):
        attention_kernel[(batch * heads * splits,)](
            query, key, value, selected, count, counters, pages_now, partial, row_maxima, weight_sums,
            scale * LOG2_E.value, heads, splits, slots, wanted, *query.stride(),
            **shape, GROUP=group, ROWS=group_rows(group, query.dtype), BLOCK=block, EACH=each,
            SIZE=size if some else 1, LISTED=some, num_warps=4,
        )
        rows = next_power_of_2(query_heads) if INTERPRETED else 1
        merge_kernel[(cdiv(batch * query_heads, rows),)](
            partial, row_maxima, weight_sums, output, count, counters, batch, splits, slots, batch * query_heads,
            **shape, ROWS=rows, SPLITS=next_power_of_2(splits), BATCH=2 if INTERPRETED else 128, num_warps=4,
        )
    return output


@_step.register_fake
def _(query: Tensor) -> Tensor:
    return query.new_empty(query.shape)


def _tile(head_dim: int, itemsize: int, slots: int, group: int, some: bool) -> tuple[int, int]:
    """The tokens of a tile of attention, and how many of them belong to each query head if pages are selected."""
    block = key_block(head_dim, itemsize, slots)
    return block, block // next_power_of_2(group) if some else block


# The state -----------------------------------------------------------------------------------------------------------


class QuestState(GrowingState):
    """The Quest cache of `batch` sequences in one layer. Attributes and errors as in the reference.

    float32, float16 or bfloat16; D from 16 to 256; up to 16 query heads per KV head. If the budget covers max_tokens,
    no page is scored. TypeError or ValueError for other arguments, and for CPU tensors outside Triton's interpreter.
    """

    Config = QuestConfig
    config: QuestConfig
    _step = _step
    _num_counters = 1
    _rows = ("key", "value", "_maximum", "_minimum", "_selected", "_pages_now", *GrowingState._rows)

    def _allocate(self) -> int:
        (batch, query_heads, heads, slots, head_dim), config = self.sizes, self.config
        room, wanted = config.pages_stored, config.pages_selected
        self.key, self.value, self._maximum, self._minimum = (
            self._buffer(batch, heads, rows, head_dim, dtype=self.dtype) for rows in (slots, slots, room, room)
        )
        self._selects = wanted < room
        self._scores = self._buffer(batch, query_heads, room if self._selects else 0, dtype=torch.float32)
        self._selected = self._buffer(batch, query_heads, wanted, dtype=torch.int32)
        self._pages_now = self._buffer(batch, dtype=torch.int64)
        _, each = _tile(head_dim, self.dtype.itemsize, slots, self.sizes.group, self._selects)
        places = wanted * config.page_size if self._selects else slots
        self._splits, _ = split_slots(self.sizes._replace(slots=places), each, self.device)
        return self._splits

    def _named(self) -> dict[str, Any]:
        config = self.config
        return super()._named() | {
            "key": self.key, "value": self.value, "maximum": self._maximum, "minimum": self._minimum,
            "scores": self._scores, "selected": self._selected, "pages_now": self._pages_now, "size": config.page_size,
            "keep_last": config.keep_last, "round_scores": config.round_scores, "splits": self._splits,
        }

    def _clear(self) -> None:
        self._pages_now.zero_()
        self._selected.fill_(-1)

    @property
    def maximum(self) -> Tensor:
        """[B, Hkv, config.pages_stored, D], copied at each access."""
        return self._of_pages(self._maximum)

    @property
    def minimum(self) -> Tensor:
        """[B, Hkv, config.pages_stored, D], copied at each access."""
        return self._of_pages(self._minimum)

    def _of_pages(self, bound: Tensor) -> Tensor:
        page = torch.arange(self.config.pages_stored, device=self.device)
        there = page * self.config.page_size < self._count[:, None]
        return bound.where(there[:, None, :, None], 0)

    @property
    def selected(self) -> Tensor:
        """[B, Hq, config.pages_selected] int64, copied at each access."""
        if self._selects:
            return self._selected.long()
        page = torch.arange(self.config.pages_selected, device=self.device)
        return page.where(page < self._pages_now[:, None], -1)[:, None].repeat(1, self.sizes.query_heads, 1)

    def _store_prompt(self, key: Tensor, value: Tensor, place: Tensor, padded: bool) -> None:
        total = key.shape[2]
        if padded:
            key, value = (tensor.take_along_dim(place[:, None, :, None], 2) for tensor in (key, value))
        self.key[:, :, :total].copy_(key)
        self.value[:, :, :total].copy_(value)
        _fill(self.key, self._count, self._maximum, self._minimum, self.config.page_size, total)
