"""ThinKV's number of tokens, its sparsity, and the tokens that its clusters keep (claims TK-8, TK-9, TK-10, TK-12).

Both twins are tested. Counts are exact: integers and fractions. A test named ..._rejects_... shows that a slightly
changed statement fails, so the claim's own test is not empty.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator
from fractions import Fraction

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvtwin.conformance.papers.claim_math import softmax

pytestmark = pytest.mark.kind("claims")

RETENTION = (64, 32, 16, 8, 4)
TAU = 128


@pytest.fixture(scope="module", params=["reference", "optimized"])
def side(request):
    return request.param


@pytest.fixture(scope="module")
def thinkv(side, twins):
    return getattr(twins, side).thinkv


def annealed(thinkv, device, size, *, current, change=False, budget=1, level=None):
    """`anneal` of sizes [B, M], with the same `current` and `change` for all rows, and nothing in the buffer."""
    size = torch.tensor(size, device=device)
    number = torch.full((len(size),), current, device=device)
    level = torch.zeros_like(size) if level is None else level
    return thinkv.anneal(
        size, level, torch.full_like(size, 2), number, torch.full_like(number, change, dtype=torch.bool),
        live=size.sum(1), budget=budget, retention=RETENTION,
    )


# ---- TK-8: the schedule (definition 3) -------------------------------------------------------------------------------


#: Lengths of segments. In the interpreter each takes 3 ms, so fewer on the optimized side.
FEW = [1, 3, 4, 5, 7, 8, 9, 16, 31, 32, 33, 64, 65, 127, 128, 140]
LENGTHS = {"reference": list(range(1, 141)), "optimized": FEW}


def selections(thinkv, device, lengths: list[int], times: int) -> Iterator[tuple[int, list[int]]]:
    """(r, sizes of segments of these lengths) after r = 1, 2, ... trajectory changes, with a sufficient budget."""
    size, level = [[length, 1] for length in lengths], None
    for number in range(1, times + 1):
        found = annealed(thinkv, device, size, current=1, change=True, budget=10**6, level=level)
        size, level = found.size.tolist(), found.level
        yield number, [row[0] for row in size]


@pytest.mark.claim("TK-8")
def test_a_segment_shrinks_along_the_schedule(thinkv, side, device):
    before = lengths = LENGTHS[side]
    for number, sizes in selections(thinkv, device, lengths, 8):
        keep = RETENTION[min(number, 5) - 1]
        assert sizes == [min(length, keep) for length in lengths]
        assert all(min(length, 4) <= size <= last for length, size, last in zip(lengths, sizes, before, strict=True))
        before = sizes


@pytest.mark.claim("TK-8")
def test_the_schedule_rejects_a_level_more_a_level_less_and_sizes_without_the_minimum(thinkv, side, device):
    lengths = LENGTHS[side]
    found = list(selections(thinkv, device, lengths, 3))
    for offset in (-1, 1):
        assert any(
            sizes != [min(length, RETENTION[max(0, number - 1 + offset)]) for length in lengths]
            for number, sizes in found
        )
    assert any(sizes != [RETENTION[number - 1]] * len(lengths) for number, sizes in found)            # short segments
    assert min(size for _, sizes in found for size in sizes) < 4                             # "at least 4 tokens"


# ---- TK-9: the budget ------------------------------------------------------------------------------------------------


def simulated(
    thinkv, device, thoughts: list[list[int]], last: int, budget: int, every: int = 1
) -> Iterator[tuple[int, int, list[int], bool]]:
    """Simulate eviction after every `every` tokens of a segment, and at its end. Yields (number of segments, tokens of
    the current one, live tokens of each row, whether any row is over budget). The last segment has `last` tokens."""
    thought = torch.tensor(thoughts, device=device)
    size, level = torch.zeros_like(thought), torch.zeros_like(thought)
    for segment in range(size.shape[1]):
        end, seen = TAU if segment + 1 < size.shape[1] else last, 0
        while seen < end:
            added = min(every, end - seen)
            seen += added
            size[:, segment] += added
            ends = (thought[:, segment] == 0) & (seen == TAU)
            size, level, over = thinkv.anneal(
                size, level, thought, torch.full_like(size[:, 0], segment), ends, live=size.sum(1), budget=budget,
                retention=RETENTION,
            )
            yield segment + 1, seen, size.sum(1).tolist(), bool(over.any())


def traces(seed: int, rows: int, count: int) -> list[list[int]]:
    draw = random.Random(seed)
    return [[draw.choice((0, 1, 2, 2)) for _ in range(count)] for _ in range(rows)]


@pytest.mark.claim("TK-9a")
def test_a_budget_below_a_segment_is_exceeded_at_once(thinkv, device):
    """k = 64, with which the paper's sweep begins."""
    live = [tokens[0] for _, _, tokens, _ in simulated(thinkv, device, [[2, 0, 1]], 7, 64)]
    assert live[:TAU] == list(range(1, TAU + 1))
    assert next(number for number, tokens in enumerate(live, 1) if tokens > 64) == 65
    assert max(live) == 4 + TAU                                                              # at the second one's end


@pytest.mark.claim("TK-9a")
def test_the_floors_of_17_segments_exceed_a_budget_of_64(thinkv, device):
    """16 segments of 4 tokens fill it. MATH-500's outputs, the shortest, have 2,468 tokens on average."""
    for finished, fits in ((15, True), (16, False)):
        live, over = at_the_floors(thinkv, device, finished, 4, budget=64)
        assert live == [4 * (finished + 1)]
        assert over == [not fits]
    assert 16 * TAU == 2048 < 2468


def at_the_floors(thinkv, device, finished: int, *tokens: int, budget: int = 1024) -> tuple[list[int], list[bool]]:
    """The number of live tokens, and whether they exceed the budget, with `current` tokens in the segment after
    `finished` others."""
    found = annealed(
        thinkv, device, [[TAU] * finished + [token] for token in tokens], current=finished, budget=budget
    )
    return found.size.sum(1).tolist(), found.over_budget.tolist()


@pytest.mark.claim("TK-9a")
def test_a_budget_of_1024_is_exceeded_beyond_28800_tokens(thinkv, device):
    """225 segments of 128 tokens keep 900 tokens, so the 125th token of the next segment is one too many."""
    assert 225 * TAU == 28_800
    assert at_the_floors(thinkv, device, 224, TAU) == ([1024], [False])
    assert at_the_floors(thinkv, device, 225, 124, 125) == ([1024, 1025], [False, True])


@pytest.mark.claim("TK-9a")
@pytest.mark.claim("TK-9b")
def test_32768_tokens_peak_at_1148(thinkv, device):
    live, over = at_the_floors(thinkv, device, 32_768 // TAU - 1, 4, 5, TAU)
    assert live == [1024, 1025, 1148]
    assert over == [False, True, True]


@pytest.mark.claim("TK-9b")
@pytest.mark.parametrize(("budget", "last"), [(64, 5), (200, 127), (300, 128)])
def test_live_tokens_never_exceed_budget_or_floors_and_the_current_segment(thinkv, side, device, budget, last):
    """Random thought types. over_budget is True when the budget is exceeded. Checked after every token; on the
    optimized side after every 16, for the time that this takes in the interpreter. That its state checks after every
    token is tested by test_thinkv_state_keeps_the_schedule."""
    every = 1 if side == "reference" else 16
    for begun, token, live, over in simulated(thinkv, device, traces(budget, 3, 7), last, budget, every):
        assert max(live) <= max(budget, 4 * (begun - 1) + token)
        assert over == (max(live) > budget)


@pytest.mark.claim("TK-9b")
def test_live_tokens_reject_floors_without_the_current_segment_and_floors_of_three(thinkv, side, device):
    steps = list(simulated(thinkv, device, traces(1, 3, 7), 100, 64, every=1 if side == "reference" else 20))
    assert any(max(live) > max(64, 4 * begun) for begun, _, live, _ in steps)
    assert any(max(live) > max(64, 3 * (begun - 1) + token) for begun, token, live, _ in steps)
    assert any(max(live) == 4 * (begun - 1) + token > 64 for begun, token, live, _ in steps)  # attained


# ---- TK-10: sparsity (sections 3.1.2, 3.1.3, C.2) --------------------------------------------------------------------

weights = st.lists(st.integers(1, 400), min_size=2, max_size=8)
shares = st.floats(0, 1, width=32)


def passed(row: list[Fraction], share: Fraction = Fraction(1, 100)) -> list[bool]:
    return [weight < share * max(row) for weight in row]


@pytest.mark.claim("TK-10a")
@given(heads=st.integers(2, 8).flatmap(
    lambda count: st.lists(st.lists(st.integers(1, 400), min_size=count, max_size=count), min_size=1, max_size=4)
))
def test_renormalising_changes_no_sparsity(heads):
    """Eq. 4 after eq. 3, in fractions."""
    rows = [[Fraction(weight, sum(head)) for weight in head] for head in heads]
    pooled = [max(column) for column in zip(*rows, strict=True)]
    assert passed(softmax(pooled)) == passed(pooled)


@pytest.mark.claim("TK-10a")
def test_renormalising_rejects_an_absolute_threshold_and_heads_that_are_not_normalised_themselves():
    rows = [[Fraction(98, 100) if token == head else Fraction(0) for token in range(4)] for head in range(4)]
    rows = [[*row, Fraction(2, 100)] for row in rows]
    pooled = [max(column) for column in zip(*rows, strict=True)]
    assert passed(pooled) == passed([weight / sum(pooled) for weight in pooled]) == [False] * 5
    assert [weight < Fraction(1, 100) for weight in pooled] == [False] * 5
    assert [weight / sum(pooled) < Fraction(1, 100) for weight in pooled] == [False] * 4 + [True]
    raw = [[Fraction(1), Fraction(1, 200)], [Fraction(1000), Fraction(1000)]]
    normal = [[weight / sum(row) for weight in row] for row in raw]
    pools = [[max(column) for column in zip(*table, strict=True)] for table in (raw, normal)]
    assert pools[0][0] / pools[0][1] != pools[1][0] / pools[1][1]


def attention(thinkv, device, *heads: list[float]) -> float:
    """The sparsity for given weights (up to a factor), one row per KV head. No weight is near the threshold, 1 % of the
    largest one, so in float32 the counts of tokens are exact. Rounding a share to float32 is undone."""
    query = torch.zeros(1, len(heads), 16, device=device)
    query[..., 0] = 1
    key = torch.zeros(1, len(heads), len(heads[0]), 16)
    key[0, :, :, 0] = torch.tensor(heads).log()
    occupied = torch.ones(1, len(heads[0]), dtype=torch.bool, device=device)
    found = float(thinkv.attention_sparsity(query, key.to(device), occupied, scale=1.0))
    count = len(heads) * len(heads[0])
    assert abs(found - round(found * count) / count) <= 2.0**-24
    return round(found * count) / count


def groups(count: int) -> list[list[float]]:
    """Each group attends to a different token, and hardly to the others."""
    return [[1.0 if token == group else 1e-4 for token in range(count)] for group in range(count)]


@pytest.mark.claim("TK-10b")
@pytest.mark.parametrize("count", [2, 4, 8])
def test_averaged_scores_have_another_sparsity_than_groups_on_average(thinkv, device, count):
    rows = groups(count)
    assert attention(thinkv, device, *rows) == 1 - 1 / count
    averaged = [sum(column) / count for column in zip(*rows, strict=True)]
    assert attention(thinkv, device, averaged) == 0


@pytest.mark.claim("TK-10b")
def test_averages_reject_groups_that_look_at_the_same_tokens(thinkv, device):
    """If all groups attend to the same tokens, both orders agree."""
    row = [1.0, 1e-4, 0.5, 1e-4]
    assert attention(thinkv, device, row, row) == attention(thinkv, device, row) == 0.5


@pytest.mark.claim("TK-10c")
@given(sparsity=shares, edges=st.tuples(shares, shares).map(sorted).map(tuple))
def test_each_sparsity_has_one_type(thinkv, device, sparsity, edges):
    for value in (sparsity, *edges):
        found = int(thinkv.classify(torch.tensor([value], device=device), edges))
        regions = {0: value >= edges[1], 2: edges[0] <= value < edges[1], 1: value < edges[0]}
        assert [kind for kind, inside in regions.items() if inside] == [found]


LOW, HIGH = 0.3, 0.7


def types(value: float, above: Callable[[float, float], bool], below: Callable[[float, float], bool]) -> int:
    """How many types a sparsity has, if edges are compared like this."""
    return [above(value, HIGH), above(value, LOW) and below(value, HIGH), below(value, LOW)].count(True)


@pytest.mark.claim("TK-10c")
def test_types_reject_edges_that_belong_to_no_one_or_to_both():
    assert types(HIGH, float.__gt__, float.__lt__) == types(LOW, float.__gt__, float.__lt__) == 0
    assert types(HIGH, float.__ge__, float.__le__) == types(LOW, float.__ge__, float.__le__) == 2


@pytest.mark.claim("TK-10d")
@given(row=weights)
def test_few_tokens_are_in_no_transition(thinkv, device, row):
    """The sparsity is at most (n - 1) / n, which one token with all of the weight attains. So n < 1 / (1 - theta_2)
    tokens are never T."""
    count = len(row)
    assert attention(thinkv, device, [float(weight) for weight in row]) <= (count - 1) / count
    assert attention(thinkv, device, [1.0] + [1e-4] * (count - 1)) == (count - 1) / count
    theta = (count - 1) / count + 1e-6                                                       # other in float32, too
    assert count < 1 / (1 - theta)
    top = torch.tensor([(count - 1) / count], device=device)
    assert int(thinkv.classify(top, (0.1, theta))) != 0


@pytest.mark.claim("TK-10d")
def test_few_tokens_reject_one_more_of_them(thinkv, device):
    theta = 0.8
    found = [
        int(thinkv.classify(
            torch.tensor([attention(thinkv, device, [1.0] + [1e-4] * (count - 1))], device=device), (0.1, theta)
        ))
        for count in (4, 5)
    ]
    assert found == [2, 0]


@pytest.mark.claim("TK-10e")
def test_an_evicted_cache_has_another_sparsity(thinkv, device):
    """A query that attends to 10 of 100 tokens is a transition. If eviction keeps only these, it is execution."""
    edges = (0.3, 0.8)
    sparsity = [attention(thinkv, device, [1.0] * 10 + [1e-4] * rest) for rest in (90, 0)]
    assert sparsity == [0.9, 0.0]
    assert thinkv.classify(torch.tensor(sparsity, device=device), edges).tolist() == [0, 1]


@pytest.mark.claim("TK-10e")
def test_an_evicted_cache_rejects_eviction_in_proportion(thinkv, device):
    """Evicting the same share of both kinds of tokens does not change the sparsity."""
    for count in (5, 10):
        assert attention(thinkv, device, [1.0] * count + [1e-4] * (9 * count)) == 0.9


# ---- TK-12: centroids (section 3.3.2, D.4) ---------------------------------------------------------------------------


def attended(query: torch.Tensor, keys: torch.Tensor) -> float:
    return float((keys @ query).exp().mean())                                               # over keys [n, 16]


@pytest.mark.claim("TK-12a")
def test_a_mean_is_no_key_and_is_not_attended_to_as_its_cluster(thinkv, device):
    cluster = torch.eye(16, dtype=torch.float64)[:1] * torch.tensor([[1.0], [-1.0]])
    mean = cluster.mean(0)
    assert not bool((cluster == mean).all(-1).any()) and not bool(mean.any())
    assert attended(3 * cluster[0], mean[None]) == 1
    assert round(attended(3 * cluster[0], cluster), 2) == round(math.cosh(3), 2) == 10.07
    assert thinkv.select_representatives(cluster.float().to(device), 1).indices.tolist() == [0]    # an existing key


@pytest.mark.claim("TK-12a")
def test_a_mean_rejects_a_cluster_of_equal_keys():
    """The mean of equal keys is a key and represents all of them."""
    cluster = torch.eye(16, dtype=torch.float64)[:1].expand(2, 16)
    assert torch.equal(cluster.mean(0), cluster[0])
    assert attended(3 * cluster[0], cluster.mean(0)[None]) == attended(3 * cluster[0], cluster)


#: Two clusters in which each token is nearest to its own mean. The token nearest to the mean of the first is in the
#: second.
CROSSED = ([(0.0, 5.0), (0.0, -5.0)], [(1.0, 0.0)])


def mean(cluster: list[tuple[float, float]]) -> tuple[float, float]:
    return sum(x for x, _ in cluster) / len(cluster), sum(y for _, y in cluster) / len(cluster)


@pytest.mark.claim("TK-12b")
def test_the_nearest_of_all_tokens_can_stand_for_two_clusters():
    means = [mean(cluster) for cluster in CROSSED]
    tokens = [token for cluster in CROSSED for token in cluster]
    for number, cluster in enumerate(CROSSED):
        assert all(min(means, key=lambda centre: math.dist(token, centre)) == means[number] for token in cluster)
    nearest = [min(tokens, key=lambda token: math.dist(token, centre)) for centre in means]
    assert nearest == [(1.0, 0.0)] * 2


@pytest.mark.claim("TK-12b")
def test_the_nearest_of_all_tokens_rejects_the_nearest_within_each_cluster():
    within = [min(cluster, key=lambda token: math.dist(token, mean(cluster))) for cluster in CROSSED]
    assert len(set(within)) == 2


@pytest.mark.claim("TK-12b")
def test_tokens_are_chosen_within_their_clusters(thinkv, device):
    """The token nearest to the mean of either cluster is the second one, but each cluster keeps one of its own."""
    tokens = [(6.0, 6.0), (2.0, 0.0), (1.0, 6.0), (6.0, -3.0)]
    key = torch.zeros(4, 16, device=device)
    key[:, :2] = torch.tensor(tokens)
    found = thinkv.select_representatives(key, 2)
    assert found.assignments[-1].tolist() == [0, 1, 1, 0]
    means = [mean([tokens[0], tokens[3]]), mean([tokens[1], tokens[2]])]
    assert [min(tokens, key=lambda token: math.dist(token, centre)) for centre in means] == [tokens[1]] * 2
    assert found.indices.tolist() == [0, 1]


@pytest.mark.claim("TK-12c")
@given(data=st.data(), size=st.integers(1, 12), keep=st.integers(1, 14))
def test_exactly_as_many_tokens_stay_as_asked_for(thinkv, device, data, size, keep):
    """Even if some keys are equal, which makes clusters empty."""
    numbers = data.draw(st.lists(st.integers(0, 3), min_size=size, max_size=size))
    key = torch.zeros(size, 16, device=device)
    key[:, 0] = torch.tensor(numbers)
    kept = thinkv.select_representatives(key, keep).indices.tolist()
    assert len(kept) == len(set(kept)) == min(keep, size)
    if keep >= len(set(numbers)) and size > keep:
        clusters = thinkv.select_representatives(key, keep).assignments[-1].tolist()
        assert len(set(clusters)) <= len(set(numbers))


@pytest.mark.claim("TK-12c")
def test_as_many_reject_clusters_that_are_not_refilled(thinkv, device):
    found = thinkv.select_representatives(torch.ones(6, 16, device=device), 4)
    assert len(set(found.assignments[-1].tolist())) == 1 != len(found.indices)
    assert found.indices.tolist() == [0, 1, 2, 3]
    key = torch.zeros(6, 16, device=device)
    key[:, 0] = torch.tensor([0, 1, 2] * 2)
    found = thinkv.select_representatives(key, 5)
    assert len(set(found.assignments[-1].tolist())) == 3 < len(found.indices) == 5
