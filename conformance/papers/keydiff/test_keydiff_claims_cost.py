"""The cost of KeyDiff: operations and complexities (claims KD-6 and KD-8; ..._blocks tests the memory of KD-6).

Counts are exact: a number type counts its operations. A test named ..._rejects_... shows that a slightly changed
statement fails, so the claim's own test is not empty.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from fractions import Fraction
from functools import cache
from itertools import pairwise, permutations

import pytest
import torch

from kvtwin.conformance.papers.claim_geometry import kept, smallest, unit, whole_vectors
from kvtwin.conformance.papers.claim_math import Counted, add_up

pytestmark = pytest.mark.kind("claims")

# ---- KD-8: the operations of A.2.1 -----------------------------------------------------------------------------------

FLOPS = {"multiply": 1, "add": 1, "divide": 5, "root": 8}                              # A.2.1; a comparison is an add
SIZES = [(1, 1), (2, 5), (10, 7), (16, 8), (9, 32)]


def root(x: Counted) -> Counted:
    x.counts["root"] += 1
    return Counted(Fraction(math.sqrt(x.number)), x.counts)


def dot(left: Iterable[Counted], right: Iterable[Counted]) -> Counted:
    return add_up(x * y for x, y in zip(left, right, strict=True))


def counted(keys: Sequence[Sequence[int]]) -> tuple[list[list[Counted]], Counter[str]]:
    counts: Counter[str] = Counter()
    return [[Counted(x, counts) for x in key] for key in keys], counts


def normalise(keys: list[list[Counted]]) -> tuple[list[Counted], list[list[Counted]]]:
    """Norms and normalised keys, with one division per key: A.2.1, first two items."""
    norms = [root(dot(key, key)) for key in keys]
    factors = [Counted(1, norm.counts) / norm for norm in norms]
    return norms, [[x * factor for x in key] for key, factor in zip(keys, factors, strict=True)]


def scores(keys: list[list[Counted]], *, average: bool = True) -> list[Counted]:
    """cos(mu, k_i), operation by operation as in A.2.1, with or without the division by n."""
    norms, normalised = normalise(keys)
    anchor = [add_up(column) for column in zip(*normalised, strict=True)]
    counts = anchor[0].counts
    if average:
        factor = Counted(1, counts) / Counted(len(keys), counts)
        anchor = [x * factor for x in anchor]
    length = root(dot(anchor, anchor))
    floor = Counted(Fraction(1, 10**8), counts)
    result = []
    for key, norm in zip(keys, norms, strict=True):
        product = norm * length
        counts["add"] += 1                                                              # the comparison of max(., eps)
        result.append(dot(anchor, key) / (product if product.number > floor.number else floor))
    return result


def ranks(keys: list[list[Counted]]) -> list[Counted]:
    """k^_i . sum of k^, which orders the tokens without another division."""
    _, normalised = normalise(keys)
    anchor = [add_up(column) for column in zip(*normalised, strict=True)]
    return [dot(key, anchor) for key in normalised]


def some_keys(n: int, d: int) -> list[list[int]]:
    return [[(i * j + i + j) % 5 + 1 for j in range(d)] for i in range(n)]


def operation_counts(n: int, d: int, make: Callable = scores, **options: bool) -> Counter[str]:
    keys, counts = counted(some_keys(n, d))
    make(keys, **options)
    return counts


def flops(counts: Counter[str]) -> int:
    return sum(FLOPS[name] * count for name, count in counts.items())


def printed_counts(n: int, d: int) -> Counter[str]:
    return Counter(multiply=3 * n * d + d + n, add=3 * n * d - n - 1, divide=2 * n + 2, root=n + 1)


@pytest.mark.claim("KD-8a")
@pytest.mark.parametrize(("n", "d"), SIZES)
def test_printed_count_has_one_division_too_many_and_d_products_too_few(n, d):
    found, printed = operation_counts(n, d), printed_counts(n, d)
    difference = {name: printed[name] - found[name] for name in FLOPS}
    assert difference == {"multiply": -d, "add": 0, "divide": 1, "root": 0}
    assert flops(printed) - flops(found) == 5 - d                                      # they cancel for d = 5 only
    assert (flops(found) == flops(printed)) is (d == 5)
    # At the size of section 3, with the formulas that the counts of this and the next test confirm: 0.008 %.
    large, small = (6 * 128 + 18) * 2048 + 2 * 128 + 12, flops(printed_counts(2048, 128))
    assert round(100 * Fraction(large - small, small), 3) == Fraction("0.008")


@pytest.mark.claim("KD-8b")
@pytest.mark.parametrize(("n", "d"), SIZES)
def test_scores_take_the_counted_operations(n, d):
    found = operation_counts(n, d)
    assert found == Counter(multiply=3 * n * d + 2 * d + n, add=3 * n * d - n - 1, divide=2 * n + 1, root=n + 1)
    assert flops(found) == (6 * d + 18) * n + 2 * d + 12
    assert flops(found) != (6 * d + 18) * n + d + 12
    # Without the division by n, which does not change cosines:
    assert flops(operation_counts(n, d, average=False)) == (6 * d + 18) * n + d + 7
    assert flops(operation_counts(n, d, average=False)) != flops(found)


@pytest.mark.claim("KD-8b")
def test_counted_scores_are_keydiffs():
    """The counted computation is right: it ranks tokens as exact arithmetic does."""
    whole = whole_vectors(3)[::11]
    keys, _ = counted(whole)
    exact = [unit(v) for v in whole]
    for make in (scores, ranks):
        found = [x.number for x in make(keys)]
        assert smallest(found, 7) == kept(exact, 7) != smallest([-x for x in found], 7)


@pytest.mark.claim("KD-8c")
@pytest.mark.parametrize(("n", "d"), SIZES)
def test_printed_items_add_up_to_the_printed_total(n, d):
    assert flops(printed_counts(n, d)) == (6 * d + 18) * n + d + 17
    assert flops(printed_counts(n, d)) != (6 * d + 18) * n + d + 16
    # So do the items of the two parts, anchor and cosines.
    anchor = Counter(multiply=2 * n * d, add=2 * n * d - n - d, root=n, divide=n + 1)
    assert anchor + Counter(multiply=n * d + d + n, add=n * d + d - 1, divide=n + 1, root=1) == printed_counts(n, d)


@pytest.mark.claim("KD-8d")
@pytest.mark.parametrize(("n", "d"), SIZES)
def test_ranks_cost_less_than_scores(n, d):
    found = operation_counts(n, d, ranks)
    assert flops(found) == (6 * d + 11) * n - d < flops(operation_counts(n, d))
    assert flops(found) != (6 * d + 11) * n
    assert found["divide"] == found["root"] == n


def matrix_products(queries: int, n: int, d: int) -> int:
    """Operations of Q K' and P V for this many queries: a lower bound on those of attention."""
    counts: Counter[str] = Counter()
    row = [Counted(1, counts)] * d
    for _ in range(queries):
        weight = [dot(row, row) for _ in range(n)]
        for _ in range(d):
            dot(weight, [weight[0]] * n)
    return flops(counts)


@pytest.mark.claim("KD-8e")
def test_scores_cost_little_beside_many_queries_only():
    n, d = 64, 16
    scoring, one = flops(operation_counts(n, d)), matrix_products(1, n, d)
    assert one == 4 * n * d - n - d
    assert scoring > one * Fraction(3, 2)                                              # decoding, one head per KV head
    assert scoring < matrix_products(2, n, d)
    assert matrix_products(8, n, d) == 8 * one                                         # a block: linear in its queries
    # A block, with G = 4, B = 128, N = 2048, d = 128: with all products, and with those that the causal mask leaves.
    group, block, budget, dim = 4, 128, 2048, 128
    size = budget + block
    scoring = (6 * dim + 18) * size + 2 * dim + 12
    every = group * block * (4 * size * dim - size - dim)
    causal = group * sum(4 * seen * dim - seen - dim for seen in range(budget + 1, size + 1))
    assert [round(100 * Fraction(scoring, cost), 4) for cost in (every, causal)] == [
        Fraction("0.3005"), Fraction("0.3095"),
    ]


# ---- KD-6: complexities ----------------------------------------------------------------------------------------------


@pytest.mark.claim("KD-6a")
@pytest.mark.parametrize("d", [1, 4, 16])
def test_scores_take_time_linear_in_the_cache(d):
    costs = [flops(operation_counts(n, d)) for n in range(1, 9)]
    steps = {after - before for before, after in pairwise(costs)}
    assert steps == {6 * d + 18} != {6 * d + 17}
    # The cost depends on d, which O(N + B) omits.
    assert flops(operation_counts(8, 2 * d)) > flops(operation_counts(8, d))


@cache
def comparisons(size: int, index: int) -> Fraction:
    """The mean number of comparisons of quickselect with random pivots to find the index-th of `size` elements."""
    if size == 1:
        return Fraction(0)
    parts = (
        comparisons(pivot, index) if index < pivot else comparisons(size - 1 - pivot, index - pivot - 1)
        for pivot in range(size) if pivot != index
    )
    return size - 1 + sum(parts, Fraction(0)) / size


def selected(items: Sequence[int], index: int) -> tuple[int, int]:
    """Quickselect with the first element as pivot: the index-th smallest element, and the number of comparisons."""
    pivot, *rest = items
    below, above = [x for x in rest if x < pivot], [x for x in rest if x >= pivot]
    if index == len(below):
        return pivot, len(rest)
    found, more = selected(below, index) if index < len(below) else selected(above, index - len(below) - 1)
    return found, more + len(rest)


@pytest.mark.claim("KD-6b")
def test_selection_is_linear_on_average_and_quadratic_at_worst():
    means = {size: max(comparisons(size, index) for index in range(size)) for size in range(1, 41)}
    assert all(mean <= 4 * size for size, mean in means.items())
    assert not all(mean <= 2 * size for size, mean in means.items())
    # Counted: with the first element as pivot, the mean over all orders is that of random pivots, and an ascending
    # order is the worst case for the last element.
    for size in range(1, 7):
        for index in range(size):
            counts = [selected(order, index)[1] for order in permutations(range(size))]
            assert Fraction(sum(counts), len(counts)) == comparisons(size, index)
            assert max(counts) <= size * (size - 1) // 2
            assert all(selected(order, index)[0] == index for order in permutations(range(size)))
    assert [selected(range(size), size - 1)[1] for size in range(1, 41)] == [n * (n - 1) // 2 for n in range(1, 41)]
    assert selected(range(40), 39)[1] > 4 * 40


def weights(budget: int, block: int, rows: int) -> int:
    """The number of causal attention weights of the last `rows` queries of a block, over a full cache and the block."""
    return sum(budget + i for i in range(block - rows + 1, block + 1))


@pytest.mark.claim("KD-6c")
def test_weights_that_the_other_methods_need():
    for budget in range(1, 10):
        for block in range(1, 10):
            every = weights(budget, block, block)
            assert every == budget * block + block * (block + 1) // 2                  # H2O
            assert budget * block + block**2 <= 2 * every <= 2 * (budget * block + block**2)
            assert weights(budget, block, 1) == budget + block                         # TOVA
            for window in range(1, block + 1):                                         # SnapKV
                assert (budget + block) * window <= 2 * weights(budget, block, window) <= 2 * (budget + block) * window
    assert not 2 * weights(9, 9, 9) <= 9 * 9 + 9                                       # not O(N B + B)
    assert not weights(9, 9, 9) <= 9 + 9                                               # nor O(N + B)


@pytest.mark.claim("KD-6e")
@pytest.mark.parametrize("side", ["reference", "optimized"])
def test_snapkv_with_and_without_a_window_keeps_different_tokens(twins, side, device):
    """6 tokens with one-dimensional keys and 4 queries, of which the last two look at other tokens than the first two.
    The sum over all 4 (A.1) is highest at token 0, that over a window of 2 (A.2) at token 1."""
    compress = getattr(twins, side).baselines.snapkv.compress
    key, query = torch.zeros(2, 1, 1, 6, 16)
    key[0, 0, 0, 0], key[0, 0, 1, 1] = 8, 7
    query[0, 0, 2:4, 0], query[0, 0, 4:, 1] = 4, 4
    key, query = key.to(device), query.to(device)
    stays = {
        window: compress(query[:, :, -window:], key, key, window + 1, kernel_size=1).kept.flatten().tolist()
        for window in (2, 4)
    }
    assert stays == {2: [1, 4, 5], 4: [0, 2, 3, 4, 5]}
    query[0, 0, 2:4] = query[0, 0, 4:]                                                 # if all look at the same token
    assert compress(query[:, :, -4:], key, key, 5, kernel_size=1).kept.flatten().tolist() == [1, 2, 3, 4, 5]
