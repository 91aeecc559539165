"""Checker of ThinKV's paged cache: the bound of attention over it, and its contents (its sparsity: thinkv_thoughts).

The truth is the reference's cache in float64. It stores the same bits, and its dequantized numbers are exact.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ....reference.attention import per_query_head
from ....reference.contract.thinkv.config import ThinKVConfig
from ....reference.thinkv.paging import PagedCache, in_order
from ... import stats
from ...cases.oracle import Attention, attend
from ...cases.paged_cases import PagedCase, paged_cases
from ...cases.thought_cases import LAYOUTS
from ..bounds import SLACK, UNIT, Arithmetic, Interval, gamma, output_error, weight_error
from ..compare import Mismatch, assert_dtype, assert_same, assert_within, fail
from ..fields import field
from ..subjects import Subject, properties
from .thinkv_thoughts import share_interval

#: The public tables of both sides.
TABLES = (
    "positions", "occupied", "segments", "thoughts", "groups", "evicted", "block_thoughts", "physical", "buffered",
    "overflow",
)


@dataclass(frozen=True)
class PagedArithmetic(Arithmetic):
    """tiles [B]: the most tiles in which a row's tokens are processed. chunked: whether there are fp8 blocks."""

    tiles: Tensor | None = None
    chunked: bool = False

    def rises(self, attention: Attention) -> Tensor:
        """Tiles are blocks of the table, which may hold few tokens, and the buffer; one more rise to combine them."""
        assert self.tiles is not None
        return torch.minimum(attention.count, (self.tiles + 1)[:, None, None, None])


def arithmetic(cache: PagedCache, dtype: torch.dtype) -> PagedArithmetic:
    """The arithmetic allowed for attention over a cache with queries of `dtype`. P is cast to that type; float16 in
    place of bfloat16 has more digits, and `attention_error` bounds its smaller range."""
    blocks = (cache.block_thoughts >= 0).sum(1)
    return PagedArithmetic(
        dtype, dtype, tiles=(blocks + 1).double(), chunked="fp8" in cache.config.formats.values()
    )


def attention_of(cache: PagedCache, query: Tensor, scale: float | None = None) -> Attention:
    """Exact attention of low-precision queries [B, Hq, D] to a float64 cache's live tokens, in order of position."""
    key, value, occupied = in_order(cache, torch.float64)
    return attend(query, key, value, occupied, scale=scale)


def widen_logits(attention: Attention, query: Tensor, key: Tensor, allowed: PagedArithmetic) -> Attention:
    """`attention` with dot products enlarged so that `bounds.logit_error` covers the errors of the paged cache.

    fp8: a chunk's scale may be applied to the dot product instead of to its elements: one rounding more, and another
    for each element, since the truth rounds its product with the scale to float32. That is D + 4 instead of D + 2
    terms. bfloat16: queries may be scaled to at most about 2^14 and cast to float16, whose absolute rounding error is
    at most 2^-25: 2^-39 of the largest |q_d| each, so 2^-39 max |q_d| sum |k_d| |scale|.
    """
    dot, terms = attention.dot, allowed.dot * (attention.head_dim + 2)
    if allowed.chunked:
        dot = dot * (1 + 2 / (attention.head_dim + 2))
    if allowed.dtype == torch.bfloat16:
        largest = query.double().abs().amax(-1)[:, :, None, None]
        sums = per_query_head(key.abs().sum(-1), attention.query_heads)[:, :, None]           # [B, Hq, 1, n]
        dot = dot + 2.0**-39 * abs(attention.scale) * largest * sums / gamma(terms)
    return replace(attention, dot=dot.masked_fill(~attention.seen, 0))


def attention_error(attention: Attention, allowed: PagedArithmetic) -> Tensor:
    """Bound of the output [B, Hq, Q, D] over a cache: `bounds.output_error`, plus the error that each format adds.

    fp8: the scale may be applied to P (one rounding), P may be cast to two bfloat16 numbers (2^-16), and the truth
    rounds the element (one more). Together this is below u_P, except in float32, where P is not cast: 3 u. bfloat16: P
    may be scaled to about 2^7 and cast to float16, whose absolute rounding error is at most 2^-25: 2^-32 of each
    weight.
    """
    error = output_error(attention, allowed)
    values = per_query_head(attention.value.abs(), attention.query_heads)
    extra = torch.zeros_like(attention.weight)
    if allowed.chunked and allowed.dtype == torch.float32:
        extra = 3 * UNIT * (attention.weight + weight_error(attention, allowed).absolute)
    if allowed.dtype == torch.bfloat16:
        extra = 2.0**-32 * attention.seen.to(extra.dtype)
    return error + (extra @ values) * SLACK


def sparsity_interval(wide: Attention, allowed: PagedArithmetic, config: ThinKVConfig) -> tuple[Interval, Tensor]:
    """`share_interval` of attention with `widen_logits`."""
    heads = wide.key_value_heads
    given: Any = SimpleNamespace(
        attention=wide, key_value_heads=heads, group=wide.query_heads // heads, occupied=wide.occupied,
        threshold=config.sparsity_threshold, sparsity_of=config.sparsity_of, dtype=allowed.dtype,
    )
    return share_interval(given, allowed)


def assert_attention_right(
    result: Any, cache: PagedCache, query: Tensor, *, scale: float | None = None, what: str = ""
) -> None:
    """Assert that a `decode_attention` result is within its bounds. cache: the reference's, in float64."""
    allowed = arithmetic(cache, query.dtype)
    attention = attention_of(cache, query, scale)
    key, _, _ = in_order(cache, torch.float64)
    wide = widen_logits(attention, query, key, allowed)
    with field("output"):
        assert_within(
            result.output, attention.output[:, :, 0], attention_error(wide, allowed)[:, :, 0], what=f"{what}output"
        )
    with field("sparsity"):
        (low, high), undecided = sparsity_interval(wide, allowed, cache.config)
        share = result.sparsity.double()
        if not bool(((share >= low) & (share <= high)).all()):
            fail(f"{what}sparsity: expected {low.tolist()} to {high.tolist()}, got {share.tolist()}")
        total = int(attention.occupied.sum()) * undecided.shape[1]
        stats.decisions(total, total - int(undecided.sum()))


class Attended(NamedTuple):
    """What `decode_attention` returns, and what the cache holds then: its TABLES, and `codes()`."""

    output: Tensor
    sparsity: Tensor
    tables: tuple[Tensor, ...]
    codes: tuple[Tensor, ...]


@dataclass(frozen=True)
class PagedSubject(Subject):
    """`decode_attention` over a cache that the module under test fills.

    If the cache holds other tokens, codes or scales than the reference's, nothing else is judged: the tests of its
    contents judge them, and their property is "state".
    """

    def result(self, module: Any, inputs: dict[str, Any]) -> Any:
        case = inputs["case"]
        return module.decode_attention(inputs["query"], case.filled(module, inputs), scale=case.scale)

    def call(self, module: Any, case: PagedCase) -> Attended:
        cache = case.cache(module)
        output, sparsity = module.decode_attention(case.query, cache, scale=case.scale)
        return Attended(output, sparsity, tuple(getattr(cache, name) for name in TABLES), tuple(cache.codes()))

    def other(self, case: PagedCase) -> PagedCase:
        """With tokens in the same places."""
        return replace(case, seed=case.seed ^ 1, schedule=case.seed if case.schedule is None else case.schedule)

    def _ends_early(self, error: Mismatch, name: str) -> bool:
        return error.of_state


def _inputs(case: PagedCase) -> dict[str, Any]:
    case.used()
    return {"case": case, **{name: case.tensor(name) for name in ("query", "key", "value")}}


def _judge_attended(actual: Attended, case: PagedCase) -> None:
    from ....reference import thinkv

    truth = case.cache(thinkv, torch.float64)
    try:
        assert_same_tables(SimpleNamespace(**dict(zip(TABLES, actual.tables, strict=True))), truth)
        for name, one, other in zip(truth.codes()._fields, actual.codes, truth.codes(), strict=True):
            assert_same(one, other, what=f"codes().{name}")
    except Mismatch as error:
        error.of_state = True
        raise
    with field("output"):
        assert_dtype(actual.output, case.dtype, what="output")
    with field("sparsity"):
        assert_dtype(actual.sparsity, torch.float32, what="sparsity")
    assert_attention_right(actual, truth, case.query, scale=case.scale)


#: Which side of the threshold a token is on is a decision. After evictions, the table has free slots among others.
ATTENTION = PagedSubject(
    "decode_attention", partial(paged_cases, most=12), _judge_attended, numbers=("output",), choices=("sparsity",),
    inputs=_inputs, sized=None,
    properties=properties(
        extreme=("overflow_88", "extreme_1e4", "tiny_values", "zero_query"), mask="evictions", full=0, masked=(1, 2, 3),
        layout=LAYOUTS,
    ),
)


def poison(cache: Any) -> None:
    """Fill all free memory of our own optimized cache with NaN, or with 1 bits. Does nothing for other caches.

    Free value scales, bytes that belong to one token each, get the largest finite scale instead: the cache never stores
    NaN there, and kernels may multiply a finite number by the weight 0 of a free slot.
    """
    if not hasattr(cache, "_storage"):
        return
    from ....optimized.thinkv import _paging_ops as ops

    storage, config, (_, heads, head_dim) = cache._storage, cache.config, cache.shape
    pool, key_scales = storage.pool.view(torch.uint8), storage.key_scales.view(torch.uint8)
    kept = torch.zeros_like(pool, dtype=torch.bool)
    spoilt = torch.full_like(pool, 255)
    of_types = [ops.stored_as(config.format_of(thought), cache.dtype) for thought in range(3)]
    parts = {fmt: ops.record_places(fmt, config.block, config.group, head_dim) for fmt in of_types}
    sizes = {fmt: ops.record_bytes(fmt, config.block, config.group, head_dim) for fmt in of_types}
    bases = {fmt: 4 * base for fmt, base in zip(cache._layout.formats, cache._layout.base, strict=False)}
    for fmt, capacity in {of_types[thought]: cache._layout.capacity[thought] for thought in range(3)}.items():
        records = spoilt[:, bases[fmt]:bases[fmt] + capacity * heads * sizes[fmt]].view(len(pool), -1, sizes[fmt])
        records[:, :, parts[fmt].scales.flatten()] = ops.LARGEST_SCALE
    for b, slot in (cache.groups >= 0).nonzero().tolist():
        entry, place = divmod(slot, config.block)
        fmt = of_types[cache.block_thoughts[b, entry]]
        for head in range(heads):
            start = bases[fmt] + (int(cache.physical[b, entry]) * heads + head) * sizes[fmt]
            for bytes_of in parts[fmt]:
                kept[b, start + bytes_of[place]] = True
    pool.copy_(torch.where(kept, pool, spoilt))
    groups = torch.zeros_like(cache._tables.group_tokens, dtype=torch.bool)
    for b, slot in (cache.groups >= 0).nonzero().tolist():
        groups[b, cache.groups[b, slot]] = True
    key_scales.masked_fill_(~groups[:, :, None, None], 255)
    if storage.chunk_scales.shape[1] > 1:
        storage.chunk_scales.masked_fill_(~groups[:, :, None, None], torch.nan)
    places = torch.arange(config.group, device=cache.device)
    waiting = (places < cache.buffered[:, None])[:, None, :, None]
    for buffer in (storage.buffer_key, storage.buffer_value):
        buffer.masked_fill_(~waiting, torch.nan)


def assert_same_tables(actual: Any, expected: PagedCache, *, what: str = "") -> None:
    """Assert that two caches have equal tables."""
    for name in TABLES:
        one, other = getattr(actual, name), getattr(expected, name)
        if one.dtype != other.dtype:
            fail(f"{what}{name}: expected {other.dtype}, got {one.dtype}")
        assert_same(one, other, what=f"{what}{name}")


def assert_same_contents(actual: Any, expected: Any, *, numbers: bool = False, what: str = "") -> None:
    """Assert that two caches store bitwise equal codes and scales; or, with `numbers`, equal dequantized numbers.

    Tokens that are not quantized have no codes. If there can be any, the bits of their numbers are compared too: their
    error is 0.
    """
    whole = "unquantized" in expected.config.formats.values()
    if not numbers:
        for name, one, other in zip(expected.codes()._fields, actual.codes(), expected.codes(), strict=True):
            assert_same(one, other, what=f"{what}codes().{name}")
    if numbers or whole:
        for name, one, other in zip(("keys", "values"), actual.dequantized(), expected.dequantized(), strict=True):
            if whole:
                one, other = (tensor.contiguous().view(torch.int32) for tensor in (one, other))
            assert_same(one, other, what=f"{what}dequantized().{name}")


def replay(case: PagedCase, module: Any) -> Iterator[str]:
    """Judge a saved case again."""
    from ....reference import thinkv

    tested, expected = case.cache(module), case.cache(thinkv)
    assert_same_tables(tested, expected)
    yield "tables"
    assert_same_contents(tested, expected)
    assert_same_contents(tested, expected, numbers=True)
    yield "codes, scales and numbers"
    result = module.decode_attention(case.query, tested, scale=case.scale)
    assert_attention_right(result, case.cache(thinkv, torch.float64), case.query, scale=case.scale)
    yield "attention and sparsity"
