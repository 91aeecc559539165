"""ThinKV's eviction under test: the exact number of tokens that segments keep, and which ones, round by round.

`model` implements definition 3 of the paper with lists of tokens.
"""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvtwin.conformance import stats
from kvtwin.conformance.cases.draws import at_least
from kvtwin.conformance.cases.layouts import lay_out
from kvtwin.conformance.cases.thought_cases import DECIDED, UNDECIDED, SegmentCase, fill, segment_cases
from kvtwin.conformance.judge.checkers import thinkv_eviction as judge
from kvtwin.conformance.judge.compare import assert_same

pytestmark = pytest.mark.kind("equivalence")

SIDES = pytest.mark.parametrize("side", ("reference", "optimized"))
some = settings(max_examples=max(at_least(4), settings().max_examples // 2))
few = settings(max_examples=max(at_least(3), settings().max_examples // 6))

PAPER = (64, 32, 16, 8, 4)
SCHEDULES = (PAPER, (3, 2, 1), (5,), (8, 8, 2), (5, 2, 0), (0,))


def module_of(twins, side):
    return getattr(twins, side).thinkv


# Number of kept tokens -----------------------------------------------------------------------------------------------


def model(
    rows: list[tuple[list[int], list[int], list[int], int, bool, int]], budget: int, retention: tuple[int, ...]
) -> tuple[list[list[int]], list[list[int]], list[bool]]:
    """The result of `anneal` for rows (sizes, levels, thoughts, current, change, beside). Segments are lists of tokens,
    which are removed one by one. `beside` tokens are in no segment."""
    sizes, levels, over = [], [], []
    for held, counts, thoughts, current, change, beside in rows:
        segments, counts = [["token"] * number for number in held], list(counts)
        before = [number for number in range(min(current, len(held))) if segments[number]]
        schedule = dict(enumerate(retention, 1))

        def anneal(number, segments=segments, counts=counts, schedule=schedule):
            counts[number] += 1
            while len(segments[number]) > schedule.get(counts[number], retention[-1]):
                segments[number].pop()

        def live(segments=segments, beside=beside):
            return beside + sum(map(len, segments))

        for number in before if change else ():
            anneal(number)
        for kind in (0, 1, 2):  # transition, execution, reasoning
            for number in before:
                while thoughts[number] == kind and live() > budget and len(segments[number]) > retention[-1]:
                    anneal(number)
        sizes.append([len(segment) for segment in segments])
        levels.append(counts)
        over.append(live() > budget)
    return sizes, levels, over


def assert_annealed(module: Any, device, rows, budget, retention, *, what: str) -> None:
    size, level, thought, current, change, beside = (
        torch.tensor(column, device=device) for column in zip(*rows, strict=True)
    )
    found = module.anneal(
        size, level, thought, current, change, live=size.sum(1) + beside, budget=budget, retention=retention
    )
    expected = model(rows, budget, retention)
    for name, tensor, numbers in zip(("size", "level", "over_budget"), found, expected, strict=True):
        dtype = torch.bool if name == "over_budget" else torch.int64
        assert tensor.dtype == dtype
        assert_same(tensor, torch.tensor(numbers, device=device), what=f"{what}: {name}")


@st.composite
def segment_rows(draw: st.DrawFn) -> tuple[list[tuple], int, tuple[int, ...]]:
    count = draw(st.integers(1, 20))
    numbers = st.sampled_from((0, 1, 3, 4, 5, 9, 31, 64, 65, 128)) | st.integers(0, 140)
    rows = [
        (
            draw(st.lists(numbers, min_size=count, max_size=count)),
            draw(st.lists(st.integers(0, 7), min_size=count, max_size=count)),
            draw(st.lists(st.integers(0, 2), min_size=count, max_size=count)),
            draw(st.integers(0, count)), draw(st.booleans()), draw(st.sampled_from((0, 0, 3, 16))),
        )
        for _ in range(draw(st.integers(1, 3)))
    ]
    total = max(sum(row[0]) for row in rows)
    return rows, draw(st.integers(1, max(1, total)) | st.integers(1, 40)), draw(st.sampled_from(SCHEDULES))


@pytest.mark.property("decisions")
@SIDES
@given(case=segment_rows())
@some
def test_anneal_is_definition_3(side, case, twins, device):
    rows, budget, retention = case
    assert_annealed(module_of(twins, side), device, rows, budget, retention, what="drawn")


@pytest.mark.property("decisions")
@SIDES
@pytest.mark.parametrize("budget", [1, 3, 5, 8])
def test_anneal_of_every_small_cache(side, budget, twins, device):
    """Three segments of 0, 1, 2 or 4 tokens with any thought types and the schedule (3, 2, 1). The current segment is
    the third or a later one. All cases are tested with one budget, and every fifth with the others; in the interpreter,
    every 199th."""
    every = [
        (list(sizes), [level, 0, 0], list(thoughts), current, change, 1)
        for thoughts in itertools.product(range(3), repeat=3) for sizes in itertools.product((0, 1, 2, 4), repeat=3)
        for level in (0, 1) for current in (2, 3) for change in (False, True)
    ]
    step = 199 if side == "optimized" and device.type == "cpu" else 1 if budget == 3 else 5
    assert_annealed(module_of(twins, side), device, every[budget % step::step], budget, (3, 2, 1), what="small")


@pytest.mark.property("decisions")
@SIDES
def test_anneal_by_hand(side, twins, device):
    """R, E, T, then the current segment. The change shrinks all three. Then T shrinks to its minimum, and E as far as
    necessary."""
    found = module_of(twins, side).anneal(
        *(torch.tensor([row], device=device) for row in ([128, 128, 100, 20], [0, 0, 0, 0], [2, 1, 0, 2])),
        torch.tensor([3], device=device), torch.tensor([True], device=device),
        live=torch.tensor([380], device=device), budget=100, retention=PAPER,
    )
    assert [tensor.tolist() for tensor in found] == [[[64, 8, 4, 20]], [[1, 4, 5, 0]], [False]]


@pytest.mark.property("decisions")
@pytest.mark.parametrize(("size", "most", "kept", "level"), [
    (3 * 10**9, 2_500_000_000, 2_500_000_000, 1), (5 * 10**9, 5 * 10**9 - 1, 4, 2), (300, 200, 200, 1),
    (2**62, 2**63 - 1, 4, 2),
])
@SIDES
def test_anneal_of_sizes_beyond_32_bits(side, size, most, kept, level, twins, device):
    """A change of thoughts shrinks the first of two segments to `most`. If the budget is still exceeded, it goes on."""
    found = module_of(twins, side).anneal(
        *(torch.tensor([row], device=device) for row in ([size, 8], [0, 0], [2, 2])),
        torch.tensor([1], device=device), torch.tensor([True], device=device),
        live=torch.tensor([size + 8], device=device), budget=size, retention=(most, 4),
    )
    assert [tensor.tolist() for tensor in found] == [[[kept, 8]], [[level, 0]], [False]]


@pytest.mark.property("layouts")
@SIDES
def test_anneal_of_many_segments_in_any_layout(side, twins, device):
    """257 segments of 128 tokens: 32,768 tokens and the rest of the prompt. Inputs are strided, and rows differ."""
    count = 257
    size = torch.full((2, count), 128, device=device)
    thought = (torch.arange(count, device=device) * 7 % 3).repeat(2, 1)
    level = torch.zeros_like(size)
    current, change = torch.tensor([count - 1, 4], device=device), torch.tensor([False, True], device=device)
    live, anneal = size.sum(1), module_of(twins, side).anneal
    inputs = [lay_out(tensor[..., None], "spread")[..., 0] for tensor in (size, level, thought)]
    found = anneal(*inputs, current, change, live=live, budget=1024, retention=PAPER)
    assert found.size[0].tolist() == [4] * 256 + [128]
    assert found.over_budget.tolist() == [True, True]
    assert found.size[1].tolist() == [4] * 4 + [128] * 253
    plain = anneal(size, level, thought, current, change, live=live, budget=1024, retention=PAPER)
    for one, other in zip(found, plain, strict=True):
        assert_same(one, other, what="annealed")


# Choice of tokens ----------------------------------------------------------------------------------------------------


@given(case=segment_cases(shrinks=True, tokens=(3, 48)))
def test_representatives_follow_from_each_assignment(case, twins):
    """For any shape, dtype, layout and content, including equal tokens and tokens far from 0."""
    judge.assert_representatives_right(twins.optimized.thinkv.select_representatives(**case.inputs), case)


@pytest.mark.property("decisions")
def test_representatives_of_a_window_of_thought(twins, device):
    """128 tokens, of which half are kept, and then all but one."""
    for keep in (64, 127):
        case = SegmentCase(
            head_dim=64, dtype=torch.float16, tokens=128, keep=keep, seed=1, device=str(device)
        )
        counts = judge.assert_representatives_right(twins.optimized.thinkv.select_representatives(**case.inputs), case)
        assert counts.total >= 128


@given(case=segment_cases(shrinks=True, tokens=(3, 48)))
@few
def test_representatives_of_the_reference_in_its_inputs_type_are_right_too(case, twins):
    judge.assert_representatives_right(twins.reference.thinkv.select_representatives(**case.inputs), case)


@given(case=segment_cases(shrinks=True, content=UNDECIDED))
@few
def test_representatives_of_distances_too_close_to_order(case, twins):
    """Lattices and near-ties: the result must be legal and well-formed, but decisions are not counted."""
    with stats.collect():
        judge.assert_representatives_right(twins.optimized.thinkv.select_representatives(**case.inputs), case)


@pytest.mark.property("decisions")
@SIDES
@given(case=segment_cases(tokens=(1, 20)))
@few
def test_representatives_are_as_many_as_asked_for(side, case, twins):
    """Exactly min(keep, L) distinct tokens in ascending order, which is all tokens if keep >= L."""
    found = module_of(twins, side).select_representatives(**case.inputs)
    assert len(set(found.indices.tolist())) == min(case.keep, case.tokens)
    assert found.indices.tolist() == sorted(found.indices.tolist())
    if case.keep >= case.tokens:
        assert found.assignments.tolist() == [list(range(case.tokens))] * judge.ROUNDS


@pytest.mark.property("repeatability")
@given(case=segment_cases(shrinks=True, tokens=(2, 24)))
@few
def test_representatives_are_bitwise_repeatable(case, twins):
    select = twins.optimized.thinkv.select_representatives
    for one, other in zip(select(**case.inputs), select(**case.inputs), strict=True):
        assert_same(one, other, what="representatives, again")


def line(device, *places: float) -> torch.Tensor:
    """Tokens on a line, [1, L, 16]."""
    key = torch.zeros(1, len(places), 16, device=device)
    key[0, :, 3] = torch.tensor(places)
    return key


@pytest.mark.property("decisions")
@SIDES
@pytest.mark.parametrize(
    ("places", "keep", "indices", "last"),
    [
        # Two groups of tokens. Each cluster keeps its middle.
        ((0.0, 10.0, 1.0, 11.0, 2.0, 12.0), 2, [2, 3], [0, 1, 0, 1, 0, 1]),
        # Both tokens of a cluster of two are equally near to the mean, so the older one is kept.
        ((5.0, 100.0, 6.0, 101.0), 2, [0, 1], [0, 1, 0, 1]),
        ((6.0, 100.0, 5.0, 101.0), 2, [0, 1], [1, 0, 1, 0]),
        # The mean of three tokens is not a token. The nearest is kept, not the first.
        ((0.0, 4.0, 5.0, 100.0), 2, [1, 3], [0, 0, 0, 1]),
        # Equal keys are all in the first cluster. The others are empty, so the oldest tokens are kept.
        ((7.0,) * 5, 3, [0, 1, 2], [0] * 5),
        # All clusters start at equal keys, so the first one has all tokens and keeps 3, the nearest to 13 / 6. For the
        # empty clusters, the farthest tokens are kept: 9, and the oldest at 0.
        ((0.0, 9.0, 0.0, 1.0, 0.0, 3.0), 3, [0, 1, 5], [0, 0, 0, 0, 0, 0]),
        # Two tokens are equally near to the mean. The older one is kept.
        ((0.0, 2.0, -2.0, 0.0), 1, [0], [0] * 4),
        ((3.0, 1.0, -1.0, -3.0), 1, [1], [0] * 4),
        # All but one token are kept.
        ((3.0, 1.0, 8.0), 2, [0, 2], [1, 1, 0]),
        ((4.0, 1.0), 1, [0], [0, 0]),
    ],
)
def test_representatives_by_hand(side, places, keep, indices, last, twins, device):
    """Small integers, for which all arithmetic except division is exact."""
    found = module_of(twins, side).select_representatives(line(device, *places), keep)
    assert found.indices.tolist() == indices
    assert found.assignments[-1].tolist() == last


@pytest.mark.property("ties")
@SIDES
def test_representatives_of_equal_distances_go_to_the_first_cluster(side, twins, device):
    """Clusters start at 0 and 2, so 1 is equally far from both."""
    found = module_of(twins, side).select_representatives(line(device, 0.0, 1.0, 2.0, 10.0), 2)
    assert found.assignments[0].tolist() == [0, 0, 1, 1]


@pytest.mark.property("decisions")
@SIDES
def test_representatives_start_at_even_distances(side, twins, device):
    """Round one shows where the clusters started: at tokens (i L) // k, each of which is nearest to itself."""
    key = torch.randn(2, 17, 24, generator=torch.Generator().manual_seed(3)).to(device)
    first = module_of(twins, side).select_representatives(key, 5).assignments[0]
    assert first[[0, 3, 6, 10, 13]].tolist() == [0, 1, 2, 3, 4]


@pytest.mark.property("decisions")
@pytest.mark.parametrize(("apart", "unit"), [(200, 1.0), (200, 1.37), (500, 1.37)])
@SIDES
def test_representatives_tell_close_keys_apart(side, apart, unit, twins, device):
    """Three groups, far apart, of tokens that differ by one unit. With dot products of 8 or 11 bits, the three tokens
    of a group seem equally near to its mean; if groups are 500 units apart, also with dot products of 16 bits."""
    places = (1, 3, 2, apart + 2, apart + 1, apart + 3, 1 - apart, 2 - apart, 3 - apart)
    found = module_of(twins, side).select_representatives(line(device, *(unit * place for place in places)), 3)
    assert found.assignments[-1].tolist() == [0] * 3 + [1] * 3 + [2] * 3
    assert found.indices.tolist() == [2, 3, 7]


@pytest.mark.property("decisions")
@SIDES
def test_representatives_concatenate_the_heads(side, twins, device):
    """Tokens that are equal in one head differ in the other: [Hkv, L, D] is treated as [L, Hkv D]."""
    key = torch.zeros(2, 6, 16, device=device)
    key[0, :, 0] = torch.tensor([0.0, 0, 0, 50, 50, 50])
    key[1, :, 15] = torch.tensor([0.0, 30, 1, 0, 30, 1])
    select = module_of(twins, side).select_representatives
    found = select(key, 4)
    assert found.assignments[-1].tolist() == [0, 1, 0, 2, 3, 2]
    assert found.indices.tolist() == [0, 1, 3, 4]
    flat = select(key.transpose(0, 1).reshape(6, 32), 4)
    assert [tensor.tolist() for tensor in flat] == [tensor.tolist() for tensor in found]


@pytest.mark.property("extreme_numbers")
@SIDES
@pytest.mark.filterwarnings("ignore:invalid value")  # a warning of numpy, which the interpreter uses
def test_representatives_of_nan_keys_have_the_requested_count(side, twins, device):
    key = torch.randn(1, 9, 16, generator=torch.Generator().manual_seed(1)).to(device)
    key[0, 2], key[0, 5], key[0, 7] = torch.nan, torch.inf, -torch.inf
    for keep in (1, 3, 8):
        found = module_of(twins, side).select_representatives(key, keep)
        assert len(set(found.indices.tolist())) == keep
        assert set(found.indices.tolist()) <= set(range(9))


# Many segments -------------------------------------------------------------------------------------------------------


def scattered(case: SegmentCase, others: int, seed: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The case as one segment in a cache of two rows with three segments each: key [2, Hkv, S, D] with NaN in free
    slots, slots [2, 3, L + 1] (at most 128), and keep [2, 3]. The case is segment (1, 1). The other segments have
    `others` fewer tokens."""
    generator = torch.Generator(case.device).manual_seed(seed)
    tokens, heads, head_dim = case.tokens, case.key_value_heads, case.head_dim
    total = 3 * tokens + 5
    key = torch.full((2, heads, total, head_dim), torch.nan, dtype=case.dtype, device=case.device)
    slots = torch.full((2, 3, min(tokens + 1, 128)), -1, device=case.device)
    keep = torch.full((2, 3), case.keep, device=case.device)
    for row in range(2):
        places = torch.randperm(total, generator=generator, device=case.device)
        for segment in range(3):
            size = tokens if (row, segment) == (1, 1) else max(1, tokens - others)
            at = places[segment * tokens:segment * tokens + size]
            slots[row, segment, :size] = at
            mine = case.key_segment if (row, segment) == (1, 1) else fill(
                "ordinary", generator, (heads, size, head_dim), case.dtype
            )
            key[row][:, at] = mine
    keep[0, 2], slots[0, 1] = tokens + 7, -1
    return key, slots, keep


@pytest.mark.property("decisions")
@given(case=segment_cases(shrinks=True, tokens=(3, 30), content=DECIDED[:3]), seed=st.integers(0, 2**32 - 1))
@few
def test_segments_shrink_the_same_alone_and_together(case, seed, twins):
    """A segment is scattered over a cache with NaN in free slots. If all its decisions are decisive, the choice equals
    that for the segment alone and that of the reference. Segments that keep all tokens, and empty ones, do not
    change."""
    alone = twins.optimized.thinkv.select_representatives(**case.inputs)
    counts = judge.assert_representatives_right(alone, case)
    key, slots, keep = scattered(case, 1, seed)
    stays = twins.optimized.thinkv.segment_representatives(key, slots, keep)
    assert stays.dtype == torch.bool and stays.shape == slots.shape
    if counts.total == counts.decisive:
        assert_same(stays[1, 1].nonzero()[:, 0], alone.indices, what="the segment's tokens")
    sizes = (slots >= 0).sum(-1)
    assert_same(stays.sum(-1), torch.minimum(sizes, keep), what="number of kept tokens")
    assert not bool((stays & (slots < 0)).any())
    held = twins.reference.thinkv.segment_representatives(key.double(), slots, keep)
    if counts.total == counts.decisive:
        assert_same(stays[1, 1], held[1, 1], what="as the reference")


@pytest.mark.property("independence")
@given(case=segment_cases(shrinks=True, tokens=(3, 16), content=DECIDED), seed=st.integers(0, 2**32 - 1))
@few
def test_segments_are_independent(case, seed, twins):
    """The choice is bitwise equal if all other segments, the free slots, and the segment's own slots are replaced."""
    plain, other = (scattered(case, 1, seed + number) for number in (0, 1))
    cut = twins.optimized.thinkv.segment_representatives
    first = cut(*plain)
    assert_same(cut(*other)[1, 1], first[1, 1], what="the unchanged segment")
    assert_same(cut(*plain), first, what="all segments, again")


@pytest.mark.property("decisions")
@SIDES
def test_segments_that_keep_more_than_most_stay_whole(side, twins, device):
    key = torch.randn(1, 1, 12, 16, generator=torch.Generator().manual_seed(2)).to(device)
    slots = torch.arange(12, device=device).view(1, 2, 6)
    keep = torch.tensor([[3, 4]], device=device)
    cut = module_of(twins, side).segment_representatives
    assert cut(key, slots, keep, most=3).sum(-1).tolist() == [[3, 6]]
    assert cut(key, slots, keep, most=4).sum(-1).tolist() == [[3, 4]]
    assert cut(key, slots, keep).sum(-1).tolist() == [[3, 4]]
    none = cut(key, slots, torch.tensor([[0, 6]], device=device))
    assert none.sum(-1).tolist() == [[0, 6]]


@pytest.mark.property("layouts")
@pytest.mark.parametrize("layout", ["transposed", "sliced", "far"])
def test_segments_in_any_layout(layout, twins, device):
    """Including offsets beyond 2^31 elements."""
    key = torch.randn(2, 2, 9, 40, generator=torch.Generator().manual_seed(4)).to(device, torch.bfloat16)
    slots = torch.tensor([[[8, 0, 3, 5, 7, -1]], [[2, 1, 8, 6, 4, 0]]], device=device)
    keep = torch.tensor([[2], [3]], device=device)
    cut = twins.optimized.thinkv.segment_representatives
    plain = cut(key, slots, keep)
    assert_same(cut(lay_out(key, layout), slots, keep), plain, what=f"{layout} keys")
    strided = lay_out(slots[..., None], "spread")[..., 0]
    assert_same(cut(key, strided, keep), plain, what="strided slots")
    assert_same(plain, twins.reference.thinkv.segment_representatives(key.double(), slots, keep), what="reference")
