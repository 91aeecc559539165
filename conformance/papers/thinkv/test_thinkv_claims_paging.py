"""ThinKV's claims about its paged cache (claims TK-6, TK-7, TK-13, TK-14): order, masks, fragmentation, scales.

A test named ..._rejects_... shows that a slightly changed statement fails, so the claim's own test is not empty.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterable
from fractions import Fraction
from functools import cache, reduce
from operator import add
from typing import Any

import pytest
import torch
from torch import Tensor

from kvtwin.conformance.cases.paged_cases import FORMATS, config_of
from kvtwin.conformance.judge.bounds import UNIT
from kvtwin.conformance.judge.checkers.thinkv_paging import assert_attention_right
from kvtwin.conformance.papers.thinkv.claim_slots import Blocks, CachedBlocks, decoded
from kvtwin.reference.attention import attention_weights, weighted_values
from kvtwin.reference.thinkv import PagedCache, decode_attention

pytestmark = pytest.mark.kind("claims")

D = 16
SIDES = pytest.mark.parametrize("side", ["reference", "optimized"])


def attention(query: Tensor, key: Tensor, value: Tensor, seen: Tensor) -> Tensor:
    """query [Hq, D]; key, value [Hkv, n, D]; seen [n] bool. Scale 1."""
    weight = attention_weights(query[None], key[None], seen[None], scale=1.0)
    return weighted_values(weight, value[None], seen[None])[0]


def drawn(seed: int, *, heads: int = 1, group: int = 1, tokens: int = 24, dtype: torch.dtype = torch.float32):
    generator = torch.Generator().manual_seed(seed)
    query = torch.randn(heads * group, D, generator=generator).to(dtype)
    key, value = torch.randn(2, heads, tokens, D, generator=generator).to(dtype)
    return query, key, value, torch.rand(tokens, generator=generator) < 0.8, torch.randperm(tokens, generator=generator)


def numbers(*of_rows: Any) -> Tensor:
    return torch.tensor(of_rows)


def filled(module: Any, key: Tensor, value: Tensor, *, thoughts: list[int], dtype: torch.dtype = torch.float32,
           formats: str = FORMATS[0], group: int = 4, block: int = 2, device: Any = "cpu") -> Any:
    """A cache with one row and tokens [Hkv, n, D]. Each `group` tokens are flushed as the next thought."""
    heads, tokens, head_dim = key.shape
    made = module(config_of(formats, tokens=64, group=group, block=block), batch=1, key_value_heads=heads,
                  head_dim=head_dim, dtype=dtype, device=device)
    for position in range(tokens):
        made.append(key[None, :, position].to(made.device, dtype), value[None, :, position].to(made.device, dtype),
                    numbers(position).to(device))
        if (position + 1) % group == 0:
            made.flush(*(numbers(x).to(device) for x in (True, thoughts[position // group], 0)))
    return made


def leave(held: Any, positions: Iterable[int]) -> None:
    held.evict(torch.isin(held.positions, torch.tensor(list(positions), device=held.device)))


# ---- TK-6: theorem 1 ------------------------------------------------------------------------------------------------


def slack(query: Tensor, key: Tensor, value: Tensor) -> float:
    """8 (n + d max|s| + 8) u max|v|, a bound on the difference of two float32 computations of the same attention. s are
    the logits, computed with absolute terms."""
    size = float((query.abs()[:, None] * key.abs().repeat_interleave(len(query) // len(key), 0)).sum(-1).max())
    return 8 * (key.shape[1] + D * size + 8) * UNIT * float(value.abs().max())


@pytest.mark.claim("TK-6a")
@pytest.mark.claim("TK-6c")
@pytest.mark.parametrize(("heads", "group"), [(1, 1), (2, 3)])
def test_joint_permutations_leave_attention_as_it_is(heads, group):
    for seed in range(30):
        query, key, value, seen, order = drawn(seed, heads=heads, group=group)
        one, other = attention(query, key, value, seen), attention(query, key[:, order], value[:, order], seen[order])
        assert float((one - other).abs().max()) <= slack(query, key, value)
        # The same holds in float64, with the u of float64.
        wide = [x.double() for x in (query, key, value)]
        one = attention(*wide, seen)
        other = attention(wide[0], wide[1][:, order], wide[2][:, order], seen[order])
        assert float((one - other).abs().max()) <= slack(*wide) * 2.0**-29


@pytest.mark.claim("TK-6a")
def test_theorem_1_rejects_less_than_a_joint_permutation():
    """If only keys are permuted, weights .893 and .107 are exchanged. If the mask is not permuted with keys and values,
    another token is attended to."""
    query, value = torch.eye(D)[:1], torch.zeros(1, 2, D)
    key = torch.zeros(1, 2, D)
    key[0, 0, 0], value[0, 0, 0] = math.log(0.893 / 0.107), 1
    both, swap = numbers(True, True), [1, 0]
    assert abs(float(attention(query, key, value, both)[0, 0]) - 0.893) <= slack(query, key, value)
    alone = float(attention(query, key[:, swap], value, both)[0, 0])
    assert abs(alone - 0.107) <= slack(query, key, value)
    assert abs(alone - 0.893) > 1000 * slack(query, key, value)
    first = numbers(True, False)
    assert float(attention(query, key, value, first)[0, 0]) == 1
    assert float(attention(query, key[:, swap], value[:, swap], first)[0, 0]) == 0


@pytest.mark.claim("TK-6a")
def test_theorem_1_rejects_positions_that_permute():
    """If keys were rotated by their slot instead of their position, order would matter."""
    query, key, value, seen, order = drawn(3)
    angle = torch.arange(key.shape[1])[None, :, None] * torch.ones(D // 2)

    def rotated(x: Tensor) -> Tensor:
        one, other = x.chunk(2, -1)
        return torch.cat((one * angle.cos() - other * angle.sin(), one * angle.sin() + other * angle.cos()), -1)

    before = attention(query, rotated(key), value, seen)
    kept = attention(query, rotated(key)[:, order], value[:, order], seen[order])
    moved = attention(query, rotated(key[:, order]), value[:, order], seen[order])
    assert float((before - kept).abs().max()) <= slack(query, key, value)
    assert float((before - moved).abs().max()) > 1000 * slack(query, key, value)


@pytest.mark.claim("TK-6b")
def test_order_shows_in_the_last_bits():
    """Weights of exactly 1/4, values 2^60, 1, -2^60, 1: the sum is 1/2 or, in another order, 1/4."""
    query, key = torch.zeros(1, D, dtype=torch.float64), torch.zeros(1, 4, D, dtype=torch.float64)
    value = torch.zeros(1, 4, D, dtype=torch.float64)
    value[0, :, 0] = numbers(2.0**60, 1.0, -(2.0**60), 1.0)
    # Not sum(), which has compensated for rounding since Python 3.12.
    found = {reduce(add, (float(x) / 4 for x in value[0, order, 0])) for order in ([0, 1, 2, 3], [0, 2, 1, 3])}
    assert found == {0.25, 0.5}
    seen = torch.ones(4, dtype=torch.bool)
    for order in ([0, 1, 2, 3], [0, 2, 1, 3]):
        output = float(attention(query, key[:, order], value[:, order], seen)[0, 0])
        assert abs(output - 0.5) <= slack(query, key, value) * 2.0**-29
        assert abs(output - 0.5) < 0.5 * slack(query, key, value)


@pytest.mark.claim("TK-6b")
def test_slots_in_any_order_give_the_same_attention(twins, device):
    """The same tokens in new slots and in reused slots: both results are within the bound."""
    query, key, value, _, _ = drawn(5, tokens=12)
    query = query[None].to(device)
    plain, reused = ({}, {})
    for name, made, dtype in (("tested", twins.optimized.thinkv.PagedCache, torch.float32),
                              ("truth", PagedCache, torch.float64)):
        plain[name] = filled(made, key[:, 4:], value[:, 4:], thoughts=[2, 1], dtype=dtype, device=device)
        reused[name] = filled(made, key[:, :8], value[:, :8], thoughts=[2, 2], dtype=dtype, device=device)
        leave(reused[name], (0, 2, 3))                                             # one token keeps the block in use
        for position in range(8, 12):
            reused[name].append(key[None, :, position].to(device, dtype), value[None, :, position].to(device, dtype),
                                numbers(position).to(device))
        reused[name].flush(*(numbers(x).to(device) for x in (True, 2, 0)))
        leave(reused[name], (1,))
    assert reused["tested"].positions[0, :8].tolist() != sorted(reused["tested"].positions[0, :8].tolist())
    outputs = []
    for held in (plain, reused):
        result = twins.optimized.thinkv.decode_attention(query, held["tested"], scale=1.0)
        assert_attention_right(result, held["truth"], query, scale=1.0)
        outputs.append(result.output)
    assert float((outputs[0] - outputs[1]).abs().max()) <= slack(query[0].cpu(), key, value)


# ---- TK-7: marks, and a kernel that ignores them ---------------------------------------------------------------------


@cache
def marked() -> tuple[PagedCache, Tensor, Tensor]:
    """A cache with two tokens with equal keys and values 6 and 0 in one block, of which the second is evicted. Also a
    query, and the attention output before the eviction."""
    key, value = torch.ones(1, 2, D), torch.full((1, 2, D), 6.0)
    value[0, 1] = 0
    held = filled(PagedCache, key, value, thoughts=[2], group=2)
    query = torch.ones(1, 1, D)
    before = decode_attention(query, held).output
    leave(held, (1,))
    return held, query, before


@pytest.mark.claim("TK-7")
def test_an_unchanged_kernel_attends_to_marked_tokens():
    """The block's contents do not change, so a kernel that reads its slots by # filled gives the same output as
    before."""
    held, query, before = marked()
    assert held.block_table(0)[0].eviction_mask == (0, 1)
    after = decode_attention(query, held).output
    assert bool((before == 3).all())
    assert bool((after == 6).all())


def attended(what: str) -> float:
    """The output of two tokens with equal keys and the values 1 and 3, of which the second is marked, if the mask sets
    `what` of it to zero, or its logit to -inf."""
    logit, stale, stays = torch.zeros(2), numbers(1.0, 3.0), numbers(1, 0)        # any contents of the slot
    value = stale * stays if what == "value" else stale
    logit = {"logit": logit * stays, "-inf": logit.masked_fill(stays == 0, -torch.inf)}.get(what, logit)
    weight = torch.softmax(logit, 0)
    return float((weight * stays if what == "weight" else weight) @ value)


@pytest.mark.claim("TK-7")
@pytest.mark.parametrize("what", ("nothing", "value", "weight", "logit"))
def test_only_masked_logits_make_marks_count(what):
    """The mask must set logits to -inf before the softmax. Setting values, or weights after the softmax, or logits to
    zero is wrong."""
    assert attended("-inf") == 1.0
    assert attended(what) != 1.0


# ---- TK-13: fragmentation -------------------------------------------------------------------------------------------


PHASES = [2] * 8 + [0] * 6 + [1] * 8 + [0] * 6


#: Segments, groups, blocks and budget are an eighth to a quarter of the paper's.
SMALL = {"budget": 128, "tau": 16, "group": 4, "schedule": (8, 4, 2, 1)}


def cached(module: Any, kinds: list[int], device: Any = "cpu", **sizes: Any) -> tuple[CachedBlocks, float, float]:
    """`decoded` with the `PagedCache` of an implementation: its blocks, and the two ratios."""
    sizes = {"tau": 128, "group": 16, **sizes}
    store = CachedBlocks(module, kinds, device, tau=sizes["tau"], group=sizes["group"], size=sizes["group"] // 2)
    return store, *decoded(kinds, store, **sizes)[1:]


@pytest.mark.claim("TK-13a")
def test_thoughts_that_change_fragment_the_cache(twins):
    """For R^8 T^6 E^8 T^6, the peak number of slots is 1.49 times the peak number of tokens, or 1.00 times if types
    shared slots. At one moment the ratio is 3.7, or 3.1 if they did."""
    _, peak, moment = cached(twins.reference.thinkv, PHASES)
    assert 1.49 < peak < 1.50
    assert 3.7 < moment < 3.8
    _, shared, least = decoded(PHASES, Blocks(shared=True))
    assert shared == 1.0
    assert 3.1 < least < 3.2
    assert decoded(PHASES, Blocks())[1:] == (peak, moment)                             # the model of slots agrees


@pytest.mark.claim("TK-13a")
@SIDES
def test_a_short_sequence_of_thoughts_fragments_the_cache(twins, side, device):
    sizes = {"budget": 8, "tau": 4, "group": 4, "schedule": (2, 1)}
    kinds = [2, 2, 0, 1, 1]
    _, peak, _ = cached(getattr(twins, side).thinkv, kinds, device, **sizes)
    assert peak > decoded(kinds, Blocks(size=2, shared=True), **sizes)[1]


@pytest.mark.claim("TK-13a")
@SIDES
def test_no_fragmentation_rejects_a_single_type(twins, side, device):
    """If the thought type never changes, there is no fragmentation. So types cause it, not eviction."""
    sizes = SMALL if side == "reference" else {"budget": 8, "tau": 4, "group": 4, "schedule": (2, 1)}
    _, peak, _ = cached(getattr(twins, side).thinkv, [2] * (20 if side == "reference" else 5), device, **sizes)
    assert peak == 1.0


@pytest.mark.claim("TK-13a")
@pytest.mark.claim("TK-20a")
@SIDES
def test_free_slots_do_not_serve_another_type(twins, side, device):
    """In the cache itself, eviction leaves one of 8 reasoning tokens in each block. 4 transition tokens open two more
    blocks although 4 slots are free. 4 reasoning tokens would open none."""
    for kind, blocks in ((0, 6), (2, 4)):
        made = getattr(twins, side).thinkv.PagedCache
        held = filled(made, *torch.ones(2, 1, 8, D), thoughts=[2, 2], device=device)
        leave(held, (0, 2, 4, 6))
        assert [entry.filled for entry in held.block_table(0)] == [1, 1, 1, 1]
        for position in range(8, 12):
            held.append(*torch.ones(2, 1, 1, D, device=device), numbers(position).to(device))
        held.flush(*(numbers(x).to(device) for x in (True, kind, 1)))
        assert len(held.block_table(0)) == blocks


@pytest.mark.claim("TK-13b")
def test_each_type_allocates_what_its_own_peak_fills(twins):
    rng = random.Random(0)
    for kinds in (PHASES, *([rng.randrange(3) for _ in range(24)] for _ in range(3))):
        store, _, _ = cached(twins.reference.thinkv, kinds, **SMALL)
        for kind in (0, 1, 2):
            assert store.blocks[kind] == math.ceil(store.most[kind] / store.size)
        assert sum(store.blocks.values()) * store.size > max(store.most.values())


@pytest.mark.claim("TK-13b")
@SIDES
def test_each_type_rejects_one_block_less(twins, side, device):
    """Five groups of 2 tokens use three blocks of 4, although two blocks and two slots would hold 10 tokens."""
    store = CachedBlocks(getattr(twins, side).thinkv, [2] * 5, device, tau=2, group=2, size=4)
    for segment in range(5):
        store.put(segment, 2, 2)
    assert (store.blocks[2], store.most[2]) == (3, 10)
    assert store.blocks[2] > store.most[2] // store.size


# ---- TK-14: scales that outlive their tokens -------------------------------------------------------------------------


@pytest.mark.claim("TK-14a")
@SIDES
def test_a_block_comes_to_hold_keys_of_several_scales(twins, side, device):
    """After reuse, a block of 2 has slots of two groups, whose keys differ by a factor of 64. With one scale per block,
    as in an unchanged table, one key has a relative error of more than 1/2."""
    key = torch.ones(1, 8, D) * torch.tensor([6 * 64.0] * 4 + [6.0] * 4)[None, :, None]
    held = filled(getattr(twins, side).thinkv.PagedCache, key[:, :4], key[:, :4], thoughts=[2], device=device)
    leave(held, (1, 3))
    for position in range(4, 8):
        token = key[None, :, position].to(device)
        held.append(token, token, numbers(position).to(device))
    held.flush(*(numbers(x).to(device) for x in (True, 2, 1)))
    assert held.groups[0, :2].tolist() == [0, 1]
    codes = held.codes()
    right = held.dequantized()[0][0, 0, :2]
    assert right[:, 0].tolist() == [6 * 64.0, 6.0]
    wrong = codes.key_scales[0, 0, 0] / codes.key_scales[0, 0, 1] * right[1]
    assert bool(((wrong - right[1]).abs() > 0.5 * right[1].abs()).all())


@pytest.mark.claim("TK-14a")
@SIDES
def test_group_ids_reject_a_fresh_block(twins, side, device):
    """Before any reuse, and if groups are whole blocks, one scale per block and channel is enough."""
    made = getattr(twins, side).thinkv.PagedCache
    held = filled(made, *torch.ones(2, 1, 16, D), thoughts=[2, 1, 2, 1], device=device)
    groups = held.groups[0, :16].view(8, 2)
    assert bool((groups[:, 0] == groups[:, 1]).all())


def bits_of_scales(groups: Iterable[int]) -> Fraction:
    """Bits per key element of the scales of the groups that have survivors: 8 per group and channel."""
    held = list(groups)
    return Fraction(8 * len(set(held)), len(held))


def expected_groups(survivors: int, *, segment: int = 128, group: int = 16) -> Fraction:
    """The mean number of groups that contain `survivors` random tokens of a segment."""
    missed = Fraction(math.comb(segment - group, survivors), math.comb(segment, survivors))
    return segment // group * (1 - missed)


@pytest.mark.claim("TK-14b")
@pytest.mark.parametrize(
    ("survivors", "bits"), [([n // 16 for n in range(128)], Fraction(1, 2)), ([0] * 4, 2), ([0, 2, 4, 6], 8)]
)
def test_scales_per_key_element(survivors: list[int], bits: Fraction):
    """Half a bit if a whole segment is live. With four survivors, 2 bits if they are in one group, 8 if in four."""
    assert bits_of_scales(survivors) == bits
    assert bits_of_scales(survivors) != bits / 2


@pytest.mark.claim("TK-14b")
def test_random_survivors_pin_most_of_the_scales():
    """Four of 128 tokens are in 3.34 of 8 groups on average, which is 6.7 bits per key element. Counting agrees."""
    bits = 8 * expected_groups(4) / 4
    assert Fraction(66, 10) < bits < Fraction(67, 10)
    rng = random.Random(1)
    counted = sum(bits_of_scales(n // 16 for n in rng.sample(range(128), 4)) for _ in range(2000)) / 2000
    assert abs(counted - bits) < Fraction(1, 10) < bits - Fraction(1, 2)


@pytest.mark.claim("TK-14b")
@SIDES
def test_the_cache_counts_pinned_scales(twins, side, device):
    """16 tokens in 4 groups of 4, blocks of 2, D = 16, int4: 8 / 4 bits of key scales and 2 of value scales. With one
    survivor per group, each uses the codes and value scales of a block of 2, and all key scales of its group."""
    made = getattr(twins, side).thinkv.PagedCache
    held = filled(made, *torch.ones(2, 1, 16, D), thoughts=[2] * 4, formats="int4 int4 int2", device=device)
    assert held.bits_per_element() == (4 + 2 + 4 + 2) / 2
    leave(held, set(range(16)) - {0, 4, 8, 12})
    assert held.bits_per_element() == (2 * 4 + 8 + 2 * (4 + 2)) / 2
    assert held.bits_per_element() != (2 * 4 + 2 + 2 * (4 + 2)) / 2, "key scales must not shrink with their tokens"


