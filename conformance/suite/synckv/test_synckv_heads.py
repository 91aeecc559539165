"""SyncKV's functions on heads under test: overlap, similarity, clusters and their representatives."""

from __future__ import annotations

import json
from fractions import Fraction
from itertools import chain, combinations, product

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvtwin.conformance.cases.draws import at_least
from kvtwin.conformance.judge.compare import assert_same
from kvtwin.reference.contract.synckv.types import SyncKVConfig

pytestmark = pytest.mark.kind("equivalence")

SIDES = pytest.mark.parametrize("side", ("reference", "optimized"))
few = settings(max_examples=max(at_least(3), settings().max_examples // 7))
#: Unit roundoff of float64.
UNIT = 2.0**-53


def module_of(twins, side):
    return getattr(twins, side).synckv


# Overlap -------------------------------------------------------------------------------------------------------------

SUBSETS = [set(chosen) for chosen in chain.from_iterable(combinations(range(3), size) for size in (1, 2, 3))]


def padded(chosen, size: int, *, front: bool = False) -> list[int]:
    """The set padded with -1: ascending, or, with `front`, descending after the -1 entries. The order does not
    matter."""
    none = [-1] * (size - len(chosen))
    return none + sorted(chosen, reverse=True) if front else sorted(chosen) + none


@pytest.mark.property("accuracy")
@SIDES
def test_overlap_of_every_two_small_sets(side, twins, device):
    """The result is bitwise equal to the quotient of two counts, rounded once."""
    pairs = list(product(SUBSETS, SUBSETS))
    first = torch.tensor([padded(one, 4) for one, _ in pairs], device=device)
    second = torch.tensor([padded(other, 3, front=True) for _, other in pairs], device=device)
    found = module_of(twins, side).overlap(first, second)
    assert found.dtype == torch.float64
    assert found.tolist() == [len(one & other) / min(len(one), len(other)) for one, other in pairs]


@pytest.mark.property("accuracy")
@given(sizes=st.tuples(st.integers(1, 40), st.integers(1, 40)), seed=st.integers(0, 2**31 - 1))
@few
def test_overlap_of_large_sets(sizes, seed, twins, device):
    """Sets larger than a tile, indices beyond 2^31, and any strides."""
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.arange(60) * 2**33
    first, second = (tokens[torch.randperm(60, generator=generator)[:size]] for size in sizes)
    expected = len(set(first.tolist()) & set(second.tolist())) / min(sizes)
    for side in ("reference", "optimized"):
        spread = first.repeat_interleave(2).to(device)[::2]
        assert module_of(twins, side).overlap(spread, second.to(device)).item() == expected


# Similarity ----------------------------------------------------------------------------------------------------------


def exact_similarity(attention, k, occupied):
    """Eq. 2 in fractions: [Hkv][Hkv]."""
    steps, heads, tokens = attention.shape
    total = [[Fraction(0)] * heads for _ in range(heads)]
    for step in range(steps):
        there = [token for token in range(tokens) if occupied[step, token]]
        best = [set(sorted(there, key=lambda token: -row[token])[:k]) for row in attention[step].tolist()]
        for i, j in product(range(heads), repeat=2):
            total[i][j] += Fraction(len(best[i] & best[j]), min(k, len(there)))
    return [[value / steps for value in row] for row in total]


def assert_similar(found, exact, steps: int) -> None:
    """Each overlap is rounded once, each of `steps` additions once, and the quotient once: at most steps + 2
    roundings."""
    assert found.dtype == torch.float64
    assert torch.equal(found, found.T)
    assert (found.diagonal() == 1).all()
    slack = Fraction((steps + 2) * UNIT) / (1 - Fraction((steps + 2) * UNIT))
    for row, truth in zip(found.tolist(), exact, strict=True):
        assert all(abs(Fraction(a) - b) <= slack * b for a, b in zip(row, truth, strict=True)), (row, truth)


@pytest.mark.property("accuracy")
@given(
    steps=st.integers(1, 3), heads=st.integers(1, 3), tokens=st.integers(1, 40), k=st.integers(1, 44),
    masked=st.booleans(), levels=st.sampled_from((2, 9, 1000)), seed=st.integers(0, 2**31 - 1),
    dtype=st.sampled_from((torch.float32, torch.float16, torch.bfloat16)),
)
@few
def test_similarity_is_the_mean_overlap(steps, heads, tokens, k, masked, levels, seed, dtype, twins, device):
    """Many equal weights, few tokens, NaN in free slots: sets are exactly right, and their mean is within the error of
    float64."""
    generator = torch.Generator().manual_seed(seed)
    attention = torch.randint(levels, (steps, heads, tokens), generator=generator).to(dtype)
    occupied = torch.ones(steps, tokens, dtype=torch.bool)
    if masked:
        occupied = torch.rand(steps, tokens, generator=generator) < 0.6
        occupied[:, 0] = True
        attention = attention.masked_fill(~occupied[:, None], torch.nan)
    exact = exact_similarity(attention, k, occupied)
    for side in ("reference", "optimized"):
        found = module_of(twins, side).head_similarity(
            attention.to(device), k, occupied=occupied.to(device) if masked else None
        )
        assert_similar(found, exact, steps)


@pytest.mark.property("accuracy")
@SIDES
def test_similarity_of_given_weights(side, twins, device):
    """Heads 0 and 1 share one of two tokens at the first step and both at the second. -inf ranks last, NaN like -inf.
    Any strides."""
    inf, nan = torch.inf, torch.nan
    attention = torch.tensor([
        [[0.9, 0.1, 0.5, 0.0], [0.9, 0.5, 0.1, 0.0], [nan, nan, 2.0, 1.0]],
        [[0.3, 0.3, 0.3, 0.1], [0.2, 0.4, 0.1, 0.1], [nan, -inf, nan, 3.0]],
    ], device=device)
    spread = attention.repeat_interleave(2, -1)[..., ::2].transpose(0, 1).contiguous().transpose(0, 1)
    found = module_of(twins, side).head_similarity(spread, 2)
    assert found.tolist() == [[1.0, 0.75, 0.5], [0.75, 1.0, 0.25], [0.5, 0.25, 1.0]]


# Clusters ------------------------------------------------------------------------------------------------------------


def exact_clusters(similarity, clusters):
    """The specified k-means, in fractions. All ties go to the lowest index."""
    table = [[Fraction(value) for value in row] for row in similarity.tolist()]
    top = max(map(max, table))
    row = [[top - value for value in line] for line in table]
    heads = range(len(row))

    def distance(one, other):
        return sum((a - b) ** 2 for a, b in zip(one, other, strict=True))

    centre = [row[0]]
    while len(centre) < clusters:
        centre.append(row[max(heads, key=lambda head: min(distance(row[head], at) for at in centre))])
    label = None
    for _ in range(20):
        before, label = label, [
            min(range(clusters), key=lambda number, head=head: distance(row[head], centre[number])) for head in heads
        ]
        for number in range(clusters):
            if number not in label:
                crowd = [head for head in heads if label.count(label[head]) > 1]
                label[max(crowd, key=lambda head: distance(row[head], centre[label[head]]))] = number
        if label == before:
            break
        centre = []
        for number in range(clusters):
            members = [row[head] for head in heads if label[head] == number]
            centre.append([sum(column) / len(members) for column in zip(*members, strict=True)])
    nearest = [
        min((head for head in heads if label[head] == number), key=lambda head: distance(row[head], centre[number]))
        for number in range(clusters)
    ]
    return tuple(label), tuple(nearest)


def symmetric(heads: int, seed: int) -> torch.Tensor:
    made = torch.rand(heads, heads, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return ((made + made.T) / 2).fill_diagonal_(1)


@pytest.mark.property("decisions")
@SIDES
@pytest.mark.parametrize("heads", [1, 2, 5, 8])
def test_clusters_are_those_of_exact_arithmetic(side, heads, twins, device):
    """Random similarities, for which no two distances are close, and all numbers of clusters."""
    for clusters in range(1, min(heads, 4) + 1):
        for seed in range(3):
            similarity = symmetric(heads, seed)
            found = module_of(twins, side).cluster_heads(similarity.to(device), clusters)
            assert (found.labels, found.representatives) == exact_clusters(similarity, clusters), (clusters, seed)


@pytest.mark.property("decisions")
@SIDES
def test_clusters_of_every_two_blocks(side, twins, device):
    """Five heads in two groups, in all 15 ways. Heads are similar within a group, one head of each group the most, and
    dissimilar across groups."""
    for mask in range(1, 16):
        group = [0] + [mask >> bit & 1 for bit in range(4)]
        leads = [group.index(0), 4 - group[::-1].index(1)]
        similarity = torch.full((5, 5), 0.125)
        for one, other in product(range(5), repeat=2):
            if group[one] == group[other]:
                similarity[one, other] = 0.875 if {one, other} & set(leads) else 0.75
        similarity.fill_diagonal_(1)
        found = module_of(twins, side).cluster_heads(similarity.to(device), 2)
        assert found.labels == tuple(group)
        assert found.labels[found.representatives[1]] == 1
        # In a group of two, both heads are equally near, so the lower index is expected.
        expected = [
            leads[number] if group.count(number) > 2 else group.index(number) for number in (0, 1)
        ]
        assert list(found.representatives) == expected


@pytest.mark.property("ties")
@SIDES
@pytest.mark.parametrize("clusters", [1, 2, 3, 4])
def test_heads_that_are_all_alike_still_make_clusters(side, clusters, twins, device):
    """No cluster is empty. Everything ties, and ties go to the lowest index."""
    found = module_of(twins, side).cluster_heads(torch.ones(4, 4, device=device), clusters)
    labels, representatives = exact_clusters(torch.ones(4, 4), clusters)
    assert (found.labels, found.representatives) == (labels, representatives)
    assert sorted(set(found.labels)) == list(range(clusters))


def test_twins_cluster_alike_where_distances_tie(twins, device):
    """Similarities with few distinct values make many ties, and sums whose rounding depends on the order. Both sides
    must agree."""
    for seed in range(12):
        generator = torch.Generator().manual_seed(seed)
        made = torch.randint(2, (7, 7), generator=generator).triu() / 10
        similarity = torch.maximum(made, made.T).fill_diagonal_(1).to(device)
        for clusters in (2, 3):
            assert twins.reference.synckv.cluster_heads(similarity, clusters) == (
                twins.optimized.synckv.cluster_heads(similarity, clusters)
            ), (seed, clusters)


# Storage -------------------------------------------------------------------------------------------------------------


def test_clusterings_are_stored_as_json(twins, tmp_path, device):
    kind = twins.reference.synckv.HeadClusters
    layers = [twins.reference.synckv.cluster_heads(symmetric(4, seed).to(device), 2) for seed in range(3)]
    path = tmp_path / "clusters.json"
    kind.save(path, layers)
    assert kind.load(path) == tuple(layers)
    stored = json.loads(path.read_text())
    assert stored["layers"][0] == {
        "labels": list(layers[0].labels), "representatives": list(layers[0].representatives)
    }


def test_config_stores_its_arguments():
    config = SyncKVConfig(64)
    assert (config.rho, config.stride, config.clusters, config.exclude_static, config.scale) == (0.5, 5, 2, True, None)
    assert_same(torch.tensor(SyncKVConfig(8, 0.25, 3, 1, exclude_static=False).stride), torch.tensor(3), what="stride")
