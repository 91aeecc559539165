"""SyncKV's claims about overlaps, budgets and sets (claims SK-1 to SK-4, SK-10, SK-11).

Both twins are tested, with logits that differ by more than the error of float32. Counts are exact: integers and
fractions. A test named ..._rejects_... shows that a slightly changed statement fails, so
the test of the claim itself is not empty.
"""

from __future__ import annotations

import math
from fractions import Fraction
from itertools import combinations, permutations, product

import pytest
import torch

from kvtwin.conformance.papers.claim_math import softmax

pytestmark = pytest.mark.kind("claims")

SUBSETS = [frozenset(chosen) for size in (1, 2, 3, 4) for chosen in combinations(range(4), size)]


@pytest.fixture(scope="module", params=["reference", "optimized"])
def side(request):
    return request.param


@pytest.fixture(scope="module")
def synckv(side, twins):
    return getattr(twins, side).synckv


def some(cases, side: str, step: int) -> list:
    """All cases, or for the optimized side every `step`-th: in the interpreter, each takes 20 ms or more."""
    return list(cases)[::1 if side == "reference" else step]


def overlap(one, other) -> Fraction:
    return Fraction(len(one & other), min(len(one), len(other)))


def of_logits(logits, device):
    """Arguments of `anticipate` for one head with these logits."""
    key = torch.zeros(1, 1, len(logits), 16)
    key[0, 0, :, 0] = torch.as_tensor(logits)
    query = torch.zeros(1, 1, 16, device=device)
    query[..., 0] = 1
    occupied = torch.ones(1, len(logits), dtype=torch.bool, device=device)
    return {"query": query, "key": key.to(device), "occupied": occupied, "scale": 1.0}


def tokens_of(index) -> set[int]:
    return set(index.flatten().tolist()) - {-1}


# ---- SK-1: the overlap coefficient -----------------------------------------------------------------------------------


@pytest.mark.claim("SK-1a")
def test_overlap_is_a_similarity(synckv, side, device):
    for one, other in some(product(SUBSETS, SUBSETS), side, 7):
        found = synckv.overlap(*(torch.tensor(sorted(each), device=device) for each in (one, other))).item()
        assert found == float(overlap(one, other)) == float(overlap(other, one))
        assert 0 <= found <= 1
        assert (found == 1) == (one <= other or other <= one)


@pytest.mark.claim("SK-1a")
def test_overlap_rejects_that_only_equal_sets_have_1():
    assert any(overlap(one, other) == 1 and one != other for one, other in product(SUBSETS, SUBSETS))


def triangle_fails(sets) -> bool:
    return any(
        1 - overlap(a, c) > (1 - overlap(a, b)) + (1 - overlap(b, c)) for a, b, c in product(sets, repeat=3)
    )


@pytest.mark.claim("SK-1b")
def test_distance_of_sets_of_one_size_obeys_the_triangle():
    for size in (1, 2, 3):
        assert not triangle_fails([set(chosen) for chosen in combinations(range(5), size)])


@pytest.mark.claim("SK-1b")
def test_distance_rejects_sets_of_several_sizes():
    assert triangle_fails([{1}, {1, 2}, {2}])


@pytest.mark.claim("SK-1c")
def test_overlap_by_chance_is_the_share_of_all_tokens():
    """The mean over all pairs of sets of k of n tokens."""
    for n, k in ((5, 2), (6, 3), (4, 4)):
        sets = [set(chosen) for chosen in combinations(range(n), k)]
        mean = sum((overlap(one, other) for one, other in product(sets, sets)), Fraction(0)) / len(sets) ** 2
        assert mean == Fraction(k, n)


@pytest.mark.claim("SK-1c")
def test_chance_rejects_that_sets_of_a_few_tokens_overlap_as_much():
    sets = [set(chosen) for chosen in combinations(range(20), 1)]
    mean = sum((overlap(one, other) for one, other in product(sets, sets)), Fraction(0)) / len(sets) ** 2
    assert mean == Fraction(1, 20) < Fraction(3, 10)


# ---- SK-2: budgets ---------------------------------------------------------------------------------------------------


def rounded_down(k: int, share: Fraction | float) -> int:
    """Section 4.2: a part of k tokens."""
    return math.floor(share * k)


@pytest.mark.claim("SK-2a")
def test_two_parts_rounded_down_may_lose_a_token():
    half = Fraction(1, 2)
    assert rounded_down(5, half) + rounded_down(5, 1 - half) == 4


@pytest.mark.claim("SK-2b")
def test_parts_sum_to_k_when_one_is_the_rest(synckv):
    for k in range(1, 129):
        for twentieths in range(21):
            static, dynamic = synckv.split_budget(k, twentieths / 20)
            assert static + dynamic == k
            assert dynamic == math.floor((1 - Fraction(twentieths, 20)) * k)


@pytest.mark.claim("SK-2b")
def test_budget_rejects_a_static_part_rounded_down_and_a_dynamic_one_rounded_up(synckv):
    assert synckv.split_budget(5, 0.5) == (3, 2)


@pytest.mark.claim("SK-2c")
def test_floor_in_floating_point_loses_tokens():
    """For rho in multiples of 1/20 and k up to 2048, 747 of 43,008 results are one too low."""
    assert rounded_down(10, 1 - 0.9) == 0
    cases = [(k, twentieths) for twentieths in range(21) for k in range(1, 2049)]
    wrong = [rounded_down(k, 1 - i / 20) - (20 - i) * k // 20 for k, i in cases]
    assert (len(cases), wrong.count(-1), wrong.count(0)) == (43008, 747, 43008 - 747)


# ---- SK-3, SK-4: unions ----------------------------------------------------------------------------------------------


def sizes_of_union(synckv, side, device, k: int, *, exclude: bool) -> set[int]:
    """The sizes for orders of k + 1 tokens at the end of the prompt and at an anticipation."""
    found = set()
    static, dynamic = synckv.split_budget(k, 0.5)
    first = synckv.initial_sets(**of_logits(range(k + 1), device), k_static=static, k_dynamic=dynamic)
    for rank in some(permutations(range(k + 1)), side, {2: 1, 4: 11}[k]):
        later = synckv.anticipate(
            **of_logits(rank, device), static=first.static, k_dynamic=dynamic, exclude_static=exclude,
        )
        found.add(len(tokens_of(first.static) | tokens_of(later)))
    return found


@pytest.mark.claim("SK-3a")
def test_union_of_eq_6_is_anything_from_half_of_k(synckv, side, device):
    assert sizes_of_union(synckv, side, device, 2, exclude=False) == {1, 2}
    assert sizes_of_union(synckv, side, device, 4, exclude=False) == {2, 3, 4}


@pytest.mark.claim("SK-3a")
def test_perfect_locality_leaves_half_of_the_budget(synckv, device):
    """If the scores do not change, the best k/2 tokens are chosen twice. With k = 2 and scores 3, 2, 1: one token."""
    for k in (2, 8, 20):
        inputs = of_logits([-token for token in range(30)], device)
        first = synckv.initial_sets(**inputs, k_static=k // 2, k_dynamic=k // 2)
        later = synckv.anticipate(**inputs, static=first.static, k_dynamic=k // 2, exclude_static=False)
        assert len(tokens_of(first.static) | tokens_of(later)) == k // 2


@pytest.mark.claim("SK-3b")
def test_union_is_k_where_static_tokens_are_left_out(synckv, side, device):
    assert sizes_of_union(synckv, side, device, 2, exclude=True) == {2}
    assert sizes_of_union(synckv, side, device, 4, exclude=True) == {4}


@pytest.mark.claim("SK-3b")
def test_union_rejects_k_for_fewer_tokens(synckv, device):
    inputs = of_logits([1.0, 2.0, 3.0], device)
    first = synckv.initial_sets(**inputs, k_static=2, k_dynamic=2)
    later = synckv.anticipate(**inputs, static=first.static, k_dynamic=2)
    assert len(tokens_of(first.static) | tokens_of(later)) == 3


@pytest.mark.claim("SK-4")
def test_initial_split_is_disjoint_and_of_size_k(synckv, side, device):
    for rank in some(permutations(range(5)), side, 29):
        inputs = of_logits(rank, device)
        for k, rho in ((1, 0.5), (3, 0.5), (4, 0.25), (5, 0.9)):
            static, dynamic = map(tokens_of, synckv.initial_sets(**inputs, **dict(zip(
                ("k_static", "k_dynamic"), synckv.split_budget(k, rho), strict=True
            ))))
            best = {token for token in range(5) if rank[token] >= 5 - k}
            assert not static & dynamic
            assert static | dynamic == best
            assert all(rank[one] > rank[other] for one, other in product(static, dynamic))


@pytest.mark.claim("SK-4")
def test_initial_split_rejects_that_the_dynamic_part_holds_the_best(synckv, device):
    found = synckv.initial_sets(**of_logits([1.0, 3.0, 2.0], device), k_static=1, k_dynamic=1)
    assert (tokens_of(found.static), tokens_of(found.dynamic)) == ({1}, {2})


# ---- SK-10, SK-11: scores and clusters -------------------------------------------------------------------------------


@pytest.mark.claim("SK-10a")
def test_softmax_keeps_the_order_of_logits():
    """For one head, exactly: x -> x / sum(x) on x = exp(s) > 0."""
    for mass in permutations([Fraction(1, 7), Fraction(2), Fraction(2, 3), Fraction(5)]):
        weight = softmax(mass)
        assert sorted(range(4), key=lambda j: mass[j]) == sorted(range(4), key=lambda j: weight[j])


@pytest.mark.claim("SK-10a")
def test_softmax_rejects_that_it_keeps_the_order_of_a_group():
    """The maximum over two heads' logits orders tokens differently from the maximum over their weights."""
    masses = [[Fraction(1), Fraction(1, 10)], [Fraction(100), Fraction(200)]]
    raw = [max(column) for column in zip(*masses, strict=True)]
    pooled = [max(column) for column in zip(*map(softmax, masses), strict=True)]
    assert raw[0] < raw[1]
    assert pooled[0] > pooled[1]


def spread_logits() -> torch.Tensor:
    """64 logits over a range of 200, the lowest first."""
    return torch.linspace(-200, 0, 64)


@pytest.mark.claim("SK-10b")
def test_weights_in_float32_tie_where_they_vanish():
    """Weights underflow 104 below the largest logit. 33 weights are positive, and 33 of the 48 best tokens are found.
    The others chosen are the first ones that tie at 0."""
    weight = spread_logits().softmax(-1)
    assert int((weight > 0).sum()) == 33
    best = weight.sort(descending=True, stable=True).indices[:48]
    assert len(set(best.tolist()) & set(range(16, 64))) == 33
    assert torch.exp(torch.tensor(-104.0)) == 0 < torch.exp(torch.tensor(-103.0))


@pytest.mark.claim("SK-10c")
def test_log_weights_in_float32_do_not_tie(synckv, device):
    found = synckv.initial_sets(**of_logits(spread_logits(), device), k_static=24, k_dynamic=24)
    assert tokens_of(found.static) | tokens_of(found.dynamic) == set(range(16, 64))


@pytest.mark.claim("SK-10c")
def test_log_weights_reject_a_range_beyond_float32(synckv, device):
    """If logits are equal after rounding, so are log-weights, and the first token is chosen, not the larger one."""
    for largest, chosen in ((2.0**23 + 1, 1), (2.0**24 + 1, 0)):
        found = synckv.initial_sets(**of_logits([largest - 1, largest], device), k_static=1, k_dynamic=0)
        assert tokens_of(found.static) == {chosen}


@pytest.mark.claim("SK-11")
def test_rows_of_similarities_cluster_with_their_diagonal(synckv, device):
    """Two pairs of similar heads: with S_ii = 1, the rows of a pair are close to each other."""
    similarity = torch.tensor([[1, 0.9, 0.1, 0.1], [0.9, 1, 0.1, 0.1], [0.1, 0.1, 1, 0.9], [0.1, 0.1, 0.9, 1]])
    assert synckv.cluster_heads(similarity.to(device), 2).labels == (0, 0, 1, 1)


@pytest.mark.claim("SK-11")
def test_clustering_rejects_a_matrix_without_its_diagonal(synckv, device):
    """Then max(S) is not 1, and D_ii is undefined. With S_ii = 0, similar heads are far apart."""
    similarity = torch.tensor([[0, 0.9, 0.8], [0.9, 0, 0.8], [0.8, 0.8, 0.0]], device=device)
    full = similarity + torch.eye(3, device=device)
    assert synckv.cluster_heads(full, 2).labels == (0, 0, 1)
    assert synckv.cluster_heads(similarity, 2).labels != (0, 0, 1)


# ---- SK-6: line 23 ---------------------------------------------------------------------------------------------------


def mean_union(n: int, k: int) -> Fraction:
    """Of two random sets of k of n tokens."""
    return 2 * k - Fraction(k * k, n)


@pytest.mark.claim("SK-6a")
def test_two_random_sets_of_128_have_a_union_of_252():
    """On average, of 4096 tokens. The formula is that of an enumeration of all pairs of sets of 2 of 5."""
    assert mean_union(4096, 128) == 252
    sets = [set(chosen) for chosen in combinations(range(5), 2)]
    mean = Fraction(sum(len(one | other) for one, other in product(sets, sets)), len(sets) ** 2)
    assert mean == mean_union(5, 2)
