"""ThinKV's paged cache: the twins store the same bits in the same places, and attention agrees with float64."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from kvtwin.conformance.cases.draws import at_least
from kvtwin.conformance.cases.layouts import MIXED
from kvtwin.conformance.cases.paged_cases import FORMATS, WHOLE, PagedCase, empty, leave, numbers, paged_cases, put
from kvtwin.conformance.cases.strategies import default_device
from kvtwin.conformance.judge.checkers.thinkv_paging import (
    assert_attention_right,
    assert_same_contents,
    assert_same_tables,
    poison,
)
from kvtwin.conformance.judge.compare import assert_same
from kvtwin.reference.contract.thinkv.types import BlockEntry

pytestmark = [pytest.mark.first, pytest.mark.main]

D = 16  # of `empty`
sides = pytest.mark.parametrize("side", ("reference", "optimized"))
few = settings(max_examples=max(at_least(6), settings().max_examples * 3 // 10))
fewer = settings(max_examples=max(2, settings().max_examples // 10))


# Against the truth ---------------------------------------------------------------------------------------------------


@pytest.mark.property("state")
# Blocks that are read as fragments: several tiles of one format, in two sizes, and three formats.
@example(case=PagedCase(
    dtype=torch.bfloat16, head_dim=64, group=4, tokens=60, shared=16, block=8, evictions=1, seed=7,
    device=str(default_device()),
))
@example(case=PagedCase(
    dtype=torch.float16, formats=FORMATS[3], head_dim=128, group=8, tokens=40, shared=16, block=8, evictions=1, seed=8,
    device=str(default_device()),
))
# Blocks that are not quantized, alone and with others, in the sizes of fragments and in others.
@example(case=PagedCase(
    dtype=torch.bfloat16, formats=WHOLE[0], head_dim=64, group=4, tokens=60, shared=16, block=8, evictions=1, seed=7,
    device=str(default_device()),
))
@example(case=PagedCase(
    dtype=torch.float16, formats=WHOLE[1], batch=2, head_dim=17, group=3, tokens=18, shared=6, block=4, evictions=1,
    seed=3, device=str(default_device()),
))
# P of fp8 blocks is stored as two numbers. float16 needs both.
@example(case=PagedCase(
    dtype=torch.float16, formats=FORMATS[-1], batch=2, group=8, tokens=12, seed=7, device=str(default_device())
))
@given(case=paged_cases())
@few
def test_paged_attention_is_as_float64_would(case, twins):
    """Tables are equal, codes and scales are bitwise equal, and attention and sparsity are within their bounds."""
    tested, expected = case.cache(twins.optimized.thinkv), case.cache(twins.reference.thinkv)
    assert_same_tables(tested, expected)
    assert_same_contents(tested, expected, numbers=case.seed % 2 == 0)
    truth = case.cache(twins.reference.thinkv, torch.float64)
    assert_same_tables(truth, expected)
    result = twins.optimized.thinkv.decode_attention(case.query, tested, scale=case.scale)
    assert_attention_right(result, truth, case.query, scale=case.scale)
    assert result.output.dtype == case.dtype
    assert result.sparsity.dtype == torch.float32


@pytest.mark.property("accuracy")
@pytest.mark.parametrize("formats", ("nvfp4 int4 ternary", "nvfp4 fp8 int2"))
@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16))
def test_a_lone_token_comes_back_exactly(formats, dtype, twins, device):
    """Its weight is 1, so the output is the stored value, for all codes of a format and for small and large scales. (An
    fp8 scale has 24 bits, so the product, and P with it, may be rounded.)"""
    cache = empty(twins.optimized.thinkv, device, batch=3, dtype=dtype, formats=formats, group=16)
    steps = torch.arange(D, device=device).to(dtype) - D // 2
    size = numbers(0.0078125, 1.0, 300.0, device=device).to(dtype)
    value = (steps * size[:, None])[:, None]                                       # [B, Hkv, D]
    kinds = numbers(0, 1, 2, device=device)
    cache.append(value, value, torch.zeros_like(kinds))
    cache.flush(torch.ones_like(kinds, dtype=torch.bool), kinds, torch.zeros_like(kinds))
    held = cache.dequantized()[1][:, :, :1]                                        # [B, Hkv, 1, D]
    query = torch.ones(3, 2, D, dtype=dtype, device=device)
    output = twins.optimized.thinkv.decode_attention(query, cache).output
    expected = held[:, 0].expand(3, 2, D)
    for row, kind in enumerate(kinds.tolist()):
        if cache.config.format_of(kind) != "fp8":
            assert_same(output[row], expected[row], what=f"output of row {row}")
        elif dtype == torch.bfloat16:
            assert_same(output[row], expected[row].to(dtype), what=f"output of row {row}")
        assert bool(expected[row].any())


# Tables --------------------------------------------------------------------------------------------------------------


@pytest.mark.property("state")
@sides
@pytest.mark.claim("TK-20b")
def test_walkthrough_of_figure_5(side, twins, device):
    """D.6, step by step, with blocks and groups of 4."""
    cache = empty(getattr(twins, side).thinkv, device, group=4, block=4, tau=4, tokens=32)
    put(cache, 0, 3, thought=2, segment=0)                                         # a: reasoning, A B C
    assert cache.block_table(0) == [BlockEntry(0, 0, 3, 2, (0,), ((1, 1, 1, 0),), (0, 0, 0, 0))]
    put(cache, 3, 4, thought=1, segment=1)                            # b: execution never shares a block with reasoning
    put(cache, 7, 1, thought=1, segment=1)
    assert [entry.thought for entry in cache.block_table(0)] == [2, 1, 1]
    assert [entry.filled for entry in cache.block_table(0)] == [3, 4, 1]
    assert [entry.physical for entry in cache.block_table(0)] == [0, 1, 2]         # R and E share a format's pool
    put(cache, 8, 4, thought=0, segment=2)                                         # c: transition; it ends, TBE marks
    leave(cache, 1, 2, 4, 5)
    marked = cache.block_table(0)
    assert marked[0] == BlockEntry(0, 0, 1, 2, (0,), ((1, 0, 0, 0),), (0, 1, 1, 0))
    assert marked[1] == BlockEntry(1, 1, 2, 1, (3,), ((1, 0, 0, 1),), (0, 1, 1, 0))
    assert marked[3] == BlockEntry(3, 0, 4, 0, (8,), ((1, 1, 1, 1),), (0, 0, 0, 0))
    put(cache, 12, 4, thought=2, segment=3)                                        # d: marked slots first, then a block
    reused = cache.block_table(0)
    assert [entry.thought for entry in reused] == [2, 1, 1, 0, 2]
    assert reused[0] == BlockEntry(0, 0, 4, 2, (0, 12), ((1, 0, 0, 0), (0, 1, 1, 1)), (0, 0, 0, 0))
    assert reused[4] == BlockEntry(4, 3, 1, 2, (12,), ((1, 0, 0, 0),), (0, 0, 0, 0))
    held = [0, 12, 13, 14, 3, -1, -1, 6, 7, -1, -1, -1, 8, 9, 10, 11, 15, -1, -1, -1]
    assert cache.positions[0, :20].tolist() == held
    assert cache.groups[0, :4].tolist() == [0, 4, 4, 4], "expected one group of scales per flush"


@pytest.mark.property("state")
@sides
def test_blocks_and_scales_come_back(side, twins, device):
    """A block without live tokens is released, even if its slots are marked. So is a group of scales."""
    cache = empty(getattr(twins, side).thinkv, device)
    put(cache, 0, 4, thought=2)
    put(cache, 4, 3, thought=0)
    leave(cache, 0, 4, 5)
    assert cache.block_thoughts[0, :5].tolist() == [2, 2, -1, 0, -1]
    assert cache.physical[0, :5].tolist() == [0, 1, -1, 1, -1]
    assert not bool(cache.evicted[0, 4:].any()), "a free block must have no marks"
    assert cache.evicted[0, :4].tolist() == [True, False, False, False]
    put(cache, 7, 4, thought=1)
    assert cache.block_thoughts[0, :5].tolist() == [2, 2, 1, 0, 1], "expected the lowest free entries"
    assert cache.physical[0, :5].tolist() == [0, 1, 2, 1, 3]
    leave(cache, 1, 2, 3)
    put(cache, 11, 2, thought=0)
    assert cache.groups[0, 6:8].tolist() == [1, 0], "group 0 has no tokens left, group 1 has one"
    assert cache.physical[0, :5].tolist() == [0, -1, 2, 1, 3], "expected the lowest free block of each pool"
    leave(cache, *range(20))
    assert not bool(cache.occupied.any())
    assert bool((cache.block_thoughts == -1).all())
    assert bool((cache.physical == -1).all())


@pytest.mark.property("state")
@sides
def test_free_slots_anywhere_in_the_table_are_found(side, twins, device):
    """The first slot, one far behind it, and the last ones. There are more slots than one chunk of the scan."""
    cache = empty(getattr(twins, side).thinkv, device, tokens=64, group=20)
    for segment in range(2):
        put(cache, 20 * segment, 20, thought=2, segment=segment)
    leave(cache, 1, 36, 39)
    put(cache, 40, 4, thought=2, segment=2)
    # Tokens 40 to 43 are in slots 1, 36, 39 and 40.
    assert cache.positions[0, :42].tolist() == [0, 40, *range(2, 36), 41, 37, 38, 42, 43, -1]


@pytest.mark.property("state")
@sides
def test_evict_ignores_unquantized_tokens(side, twins, device):
    cache = empty(getattr(twins, side).thinkv, device)
    put(cache, 0, 2, thought=1)
    put(cache, 2, 2)
    everything = torch.ones_like(cache.occupied)
    cache.evict(everything)
    assert cache.positions[cache.occupied].tolist() == [2, 3]
    cache.evict(everything)
    assert cache.buffered.tolist() == [2]
    assert not bool(cache.evicted.any())


@pytest.mark.property("state")
@sides
def test_operations_on_some_rows_leave_the_others_alone(side, twins, device):
    """Append and flush for some rows only, with different types; release a row and use it again; copy rows."""
    cache = empty(getattr(twins, side).thinkv, device, batch=3)
    key = torch.randn(3, 1, D, device=device)
    for position in range(3):
        cache.append(key, key, numbers(position, -1, 10 + position, device=device))
    cache.flush(numbers(True, True, False, device=device), numbers(2, 7, 0, device=device),
                numbers(1, 99, 0, device=device))                               # the buffer of row 1 is empty: no error
    assert cache.buffered.tolist() == [0, 0, 3]
    assert cache.segments[0, :3].tolist() == [1, 1, 1]
    assert not bool(cache.occupied[1].any())
    assert cache.positions[2, -4:].tolist() == [10, 11, 12, -1]
    before = cache.codes()
    cache.reorder(numbers(2, 0, 0, device=device))
    assert cache.buffered.tolist() == [3, 0, 0]
    assert_same(cache.positions[1], cache.positions[2], what="two copies of a row")
    assert_same(cache.codes().keys[2], before.keys[0], what="codes of a copied row")
    cache.release(numbers(True, False, True, device=device))
    assert cache.occupied.sum(1).tolist() == [0, 3, 0]
    cache.append(key, key, numbers(0, 3, 0, device=device))                        # positions may be reused
    assert cache.buffered.tolist() == [1, 1, 1]


@pytest.mark.property("state")
@sides
def test_a_reset_cache_is_a_fresh_one(side, twins, device):
    """Segments may have their numbers again. They begin where their first token is."""
    used, fresh = (empty(getattr(twins, side).thinkv, device, batch=2, tokens=4) for _ in range(2))
    put(used, 0, 4, thought=0)
    leave(used, 1)
    used.reset()
    for cache in (used, fresh):
        put(cache, 2, 3, thought=0)
    assert used.block_table(1) == fresh.block_table(1)
    assert used.block_table(1)[0].start_indices == (2,)
    for name in ("positions", "segments", "groups", "evicted", "physical", "buffered", "overflow"):
        assert_same(getattr(used, name), getattr(fresh, name), what=name)


# Invariance ----------------------------------------------------------------------------------------------------------


def twice(case: PagedCase, module: Any, change: Any) -> None:
    """Assert that attention is bitwise equal after `change(cache)`."""
    cache = case.cache(module)
    before = module.decode_attention(case.query, cache, scale=case.scale)
    change(cache)
    after = module.decode_attention(case.query, cache, scale=case.scale)
    assert_same(after.output, before.output, what="output")
    assert_same(after.sparsity, before.sparsity, what="sparsity")


@pytest.mark.property("free_slots")
@example(case=PagedCase(
    dtype=torch.bfloat16, formats=WHOLE[0], batch=2, key_value_heads=2, head_dim=32, group=2, tokens=14, evictions=1,
    seed=3, device=str(default_device()),
))
@given(case=paged_cases(content=("ordinary",)))
@fewer
def test_nothing_but_live_tokens_matters(case, twins):
    """Poison in all places without a live token: codes, NaN as E4M3 and float32 scales, and NaN in the buffer."""
    twice(case, twins.optimized.thinkv, poison)


@pytest.mark.property("free_slots")
@sides
def test_contents_of_evicted_tokens_have_no_effect(side, twins, device):
    """Two caches that differ only in evicted tokens. These are negated copies, so that scales are equal."""
    module = getattr(twins, side).thinkv
    results = []
    for sign in (1, -1):
        cache = empty(module, device)
        key, value = torch.randn(2, 1, 1, D, generator=torch.Generator().manual_seed(2)).to(device)
        for position, factor in enumerate((1, sign, 0.5, sign)):
            cache.append(factor * key, factor * value, numbers(position, device=device))
        cache.flush(numbers(True, device=device), numbers(1, device=device), numbers(0, device=device))
        leave(cache, 1, 3)
        results.append(module.decode_attention(key[:, [0, 0]], cache))
    assert_same(results[1].output, results[0].output, what="output")
    assert_same(results[1].sparsity, results[0].sparsity, what="sparsity")


@pytest.mark.property("independence")
@given(case=paged_cases(content=("ordinary", "dominant")), data=st.data())
@fewer
def test_rows_are_independent(case, data, twins):
    """At a fixed shape, results are bitwise equal after a second launch, and after other rows are released or
    replaced."""
    module = twins.optimized.thinkv
    cache = case.cache(module)
    before = module.decode_attention(case.query, cache, scale=case.scale)
    again = module.decode_attention(case.query, cache, scale=case.scale)
    assert_same(again.output, before.output, what="output, launched again")
    row = data.draw(st.integers(0, case.batch - 1))
    cache.release(torch.arange(case.batch, device=case.query.device) != row)
    alone = module.decode_attention(case.query, cache, scale=case.scale)
    assert_same(alone.output[row], before.output[row], what="output without the other rows")
    assert_same(alone.sparsity[row], before.sparsity[row], what="sparsity without the other rows")
    index = torch.full((case.batch,), row, device=case.query.device)
    cache.reorder(index)
    copied = module.decode_attention(case.query[index], cache, scale=case.scale)
    assert_same(copied.output, before.output[index], what="output of a copied row")


@pytest.mark.property("layouts")
@given(case=paged_cases(content=("ordinary",), most=8))
@settings(max_examples=2)
def test_strides_do_not_matter(case, twins):
    """The strides of queries, keys and values have no effect, whatever is stored between their elements."""
    case = dataclasses.replace(case, batch=2, key_value_heads=2)
    module = twins.optimized.thinkv
    one = case.cache(module)
    output = module.decode_attention(case.query, one, scale=case.scale).output
    for layout in ("transposed", "sliced", "spread", MIXED):
        other = dataclasses.replace(case, layout=layout)
        two = other.cache(module)
        assert_same_contents(two, one, numbers=True)
        assert_same(module.decode_attention(other.query, two, scale=case.scale).output, output, what="output")


@pytest.mark.property("free_slots")
@sides
def test_attention_of_an_empty_row_is_zero(side, twins, device):
    module = getattr(twins, side).thinkv
    cache = empty(module, device, batch=2)
    key = torch.ones(2, 1, D, device=device)
    cache.append(key, 3 * key, numbers(-1, 5, device=device))
    result = module.decode_attention(torch.ones(2, 3, D, device=device), cache)
    assert not bool(result.output[0].any())
    assert_same(result.output[1], torch.full((3, D), 3.0, device=device), what="the one token in a buffer")
    assert result.sparsity.tolist() == [0, 0]


@pytest.mark.property("independence")
@sides
@pytest.mark.parametrize(("dtype", "head_dim"), [(torch.float32, D), (torch.bfloat16, 64)])
def test_sparsity_is_computed_for_the_chosen_rows_only(dtype, head_dim, side, twins, device):
    """The sparsity of the other rows is NaN, and all outputs are bitwise equal, on both paths through the kernels and
    with any stride."""
    module = getattr(twins, side).thinkv
    cache = empty(module, device, batch=3, dtype=dtype, head_dim=head_dim, block=8)
    put(cache, 0, 4, thought=2)
    put(cache, 4, 4, thought=2)
    put(cache, 8, 2)
    query = 4 * torch.randn(3, 3, head_dim, generator=torch.Generator().manual_seed(19)).to(device, dtype)
    everybody = module.decode_attention(query, cache)
    assert not bool(everybody.sparsity.isnan().any())
    for looks in ([True, False, True], [False, True, False], [False] * 3, [True] * 3):
        sparsity_mask = torch.tensor([looks, [not it for it in looks]], device=device).T.contiguous()[:, 0]
        assert sparsity_mask.stride() == (2,)
        result = module.decode_attention(query, cache, sparsity_mask=sparsity_mask)
        assert_same(result.output, everybody.output, what="output")
        assert torch.equal(result.sparsity.isnan(), ~sparsity_mask)
        assert_same(result.sparsity[sparsity_mask], everybody.sparsity[sparsity_mask], what="sparsity")


@pytest.mark.property("accuracy")
@sides
def test_sparsity_of_the_mean_of_heads(side, twins, device):
    """Each of two KV heads attends to a token of its own and, by 2^-6, to a third one. In the mean, only the fourth
    token is not attended to. Evicted tokens do not count, and rows that are not looked at have no sparsity."""
    module = getattr(twins, side).thinkv
    for sparsity_of, before, after in (("heads", 0.5, 1 / 3), ("mean", 0.25, 0.0)):
        cache = empty(module, device, batch=2, heads=2, formats="fp8 fp8 fp8", sparsity_of=sparsity_of)
        for position, logits in enumerate([(0, -10), (-10, 0), (-6, -6), (-10, -10)]):
            key = torch.zeros(2, 2, D, device=device)
            key[..., 0], key[..., 1] = numbers(*logits, device=device), 14       # a scale of 2^-5, so that all is exact
            cache.append(key, key, numbers(position, position, device=device))
        query = torch.zeros(2, 2, D, device=device)
        query[..., 0] = float(torch.tensor(2.0).log())
        found = [module.decode_attention(query, cache, scale=1.0).sparsity]
        cache.flush(*(numbers(x, x, device=device) for x in (True, 2, 0)))
        found.append(module.decode_attention(query, cache, scale=1.0).sparsity)
        leave(cache, 3)
        sparsity_mask = numbers(False, True, device=device)
        share = module.decode_attention(query, cache, scale=1.0, sparsity_mask=sparsity_mask).sparsity
        assert bool(share[0].isnan())
        expected = torch.tensor([before, before, before, before, after], device=device)
        assert_same(torch.cat((*found, share[1:])), expected, what=f"sparsity of {sparsity_of}")


@pytest.mark.property("accuracy")
@sides
def test_sparsity_normalises_each_head_by_its_own_sum(side, twins, device):
    """Logits in base 2 fall by 1 or by 3 per token, so weights are 2^-1, 2^-2, ... and 7/8, 7/64, .... The largest
    weight is 7/8, and tokens 6 to 9 have less than 1/100 of it. If heads were pooled relative to their largest weights,
    only tokens 7 to 9 would. The same holds in the buffer and in blocks."""
    module = getattr(twins, side).thinkv
    for flushed in (False, True):
        cache = empty(module, device, formats="fp8 fp8 fp8", group=10)
        for position in range(10):
            key = torch.zeros(1, 1, D, device=device)
            key[..., 0], key[..., 1] = -position, 14                             # a scale of 2^-5, so that all is exact
            cache.append(key, key, numbers(position, device=device))
        if flushed:
            cache.flush(*(numbers(x, device=device) for x in (True, 2, 0)))
        query = torch.zeros(1, 2, D, device=device)
        query[0, :, 0] = numbers(1.0, 3.0, device=device) * float(torch.tensor(2.0).log())
        result = module.decode_attention(query, cache, scale=1.0)
        assert_same(result.sparsity, torch.tensor([0.4], device=device), what="sparsity")
