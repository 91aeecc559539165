"""Tests of the checker of ThinKV's k-means: its bounds are sound and tight, and it detects wrong results.

emulate.py has the arithmetic: float32 in many orders, fused, flushing, and with truncated sums.
"""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from kvtwin.conformance.cases.thought_cases import CONTENTS, SegmentCase, SparsityCase, fill
from kvtwin.conformance.judge.bounds import UNIT
from kvtwin.conformance.judge.checkers import thinkv_eviction as judge
from kvtwin.conformance.judge.checkers import thinkv_thoughts
from kvtwin.conformance.judge.compare import Mismatch, assert_within
from kvtwin.conformance.tool.emulate import Machine
from kvtwin.reference.thinkv import attention_sparsity, select_representatives


@pytest.fixture(autouse=True)
def keep_failures_out_of_the_tree(tmp_path, monkeypatch):
    monkeypatch.setenv("KVTWIN_FAILURES", str(tmp_path))


@dataclass(frozen=True)
class ClusterMachine(Machine):
    """A way to compute distances. parts: from a Gram matrix of keys that are split into three parts of 8 bits. pair:
    with keys centred on the mean of two tokens. centroids: from centroids instead of a Gram matrix."""

    parts: bool = False
    pair: bool = False
    centroids: bool = False

    def mean(self, terms: Tensor, count: Tensor) -> Tensor:
        """The mean over the last axis."""
        return self.sum(terms) / count.float().clamp_min(1)

    def gram(self, token: Tensor) -> Tensor:
        if not self.parts:
            return self.product_sum(token[:, None], token)
        high = token.bfloat16().float()
        middle = (token - high).bfloat16().float()
        low = (token - high) - middle
        pairs = ((low, high), (high, low), (middle, middle), (middle, high), (high, middle))
        rest = torch.cat([left[:, None] * right for left, right in pairs], -1)
        return self.plus(self.product_sum(high[:, None], high), self.sum(rest))

    def distances(self, token: Tensor, member: Tensor) -> tuple[Tensor, Tensor]:
        """||x_j - centroid_c||^2 [L, k], and the origin [F]."""
        count = member.sum(0)
        if self.centroids:
            terms = torch.where(member.T[:, None], token.T, 0)                            # [k, F, L]
            apart = self.plus(token[:, None], -self.mean(terms, count[:, None]))
            return self.product_sum(apart, apart), torch.zeros(token.shape[1])
        some = token[[len(token) // 4, 3 * len(token) // 4]] if self.pair else token
        origin = self.mean(some.T, torch.tensor(len(some)))
        centred = self.plus(token, -origin)
        gram = self.gram(centred)
        sums = self.mean(torch.where(member.T, gram[:, None], 0), count)                  # [L, k]
        within = self.mean(torch.where(member, sums, 0).T, count)
        norm = gram.diagonal()[:, None]
        return self.plus(norm, self.plus(within, -2 * sums)), origin


MACHINES = (
    ClusterMachine("sequential", truncates=True, parts=True, pair=True), ClusterMachine("reversed", fused=True),
    ClusterMachine("pairwise", flushes=True, parts=True, pair=True), ClusterMachine("strided", centroids=True),
    ClusterMachine("sequential", fused=True, centroids=True),
)


def utilisation(machine: ClusterMachine, token: Tensor, member: Tensor) -> float:
    """The largest errors, relative to their bounds: of distances, without the common error of a token, and of distances
    to a token's own cluster."""
    found = judge.distances(token.double(), member)
    computed, origin = machine.distances(token.float(), member)
    there = member.any(0)
    own = torch.where(member, computed.double(), 0).sum(1)
    held = member.any(1)
    used = assert_within(own[held], found.own[held], found.own_error[held], what="distance to the own cluster")
    computed = computed.double()
    if not machine.centroids:
        # The error of a token's norm is common to all its distances.
        shared = machine.gram(machine.plus(token.float(), -origin)).diagonal().double()
        computed = computed - (shared - (token.double() - origin.double()).square().sum(1))[:, None]
    # The emulation adds the norm and rounds, which comparisons of clusters do not.
    error = found.error + UNIT * (found.squared + found.error)
    return max(used, assert_within(computed[:, there], found.squared[:, there], error[:, there], what="distance"))


def clusters(tokens: int, count: int, seed: int) -> Tensor:
    """A random assignment, which may leave clusters empty."""
    assigned = torch.randint(count, (tokens,), generator=torch.Generator().manual_seed(seed))
    return assigned[:, None] == torch.arange(count)


@pytest.mark.parametrize("content", CONTENTS)
@pytest.mark.parametrize("machine", MACHINES, ids=str)
def test_no_correct_arithmetic_exceeds_the_bounds(machine, content):
    for dtype, tokens, channels in (
        (torch.float32, 16, 16), (torch.bfloat16, 23, 40), (torch.float16, 9, 24), (torch.float32, 1, 16),
    ):
        token = fill(content, torch.Generator().manual_seed(tokens), (1, tokens, channels), dtype)[0]
        for count in (1, 1 + tokens // 3):
            utilisation(machine, token, clusters(tokens, count, count))


@pytest.mark.parametrize("machine", MACHINES, ids=str)
def test_ordinary_data_reaches_one_percent_of_the_bound(machine):
    """For F = 16, L = 16 and float32."""
    generator = torch.Generator().manual_seed(1)
    worst = max(
        utilisation(machine, fill("ordinary", generator, (1, 16, 16), torch.float32)[0], clusters(16, 4, seed))
        for seed in range(12)
    )
    assert 0.01 <= worst <= 1, worst


def test_sums_made_to_err_reach_ten_percent_at_larger_shapes():
    """A token and its negative. The first product is 1, and all others are just too small to change 1."""
    for channels in (128, 256):
        token = torch.full((2, channels), (2.0**-24 * (1 - 2.0**-8)) ** 0.5)
        token[:, 0] = 1
        token[1] *= -1
        used = utilisation(ClusterMachine("sequential"), token, torch.eye(2) > 0)
        assert 0.1 <= used <= 1, (channels, used)


# Wrong results that it detects ---------------------------------------------------------------------------------------


def good(content: str = "clumps", tokens: int = 20, keep: int = 6, seed: int = 0):
    case = SegmentCase(tokens=tokens, keep=keep, content=content, seed=seed, key_value_heads=2)
    return case, select_representatives(**case.inputs)


def test_what_is_right_is_accepted():
    for content in CONTENTS:
        case, found = good(content)
        counts = judge.assert_representatives_right(found, case)
        assert 0 <= counts.decisive <= counts.total


@pytest.mark.parametrize("number", [0, 4, 9])
def test_a_token_in_another_cluster_is_found(number):
    case, found = good()
    assignments = found.assignments.clone()
    assignments[number, 3] = (assignments[number, 3] + 1) % case.keep
    with pytest.raises(Mismatch, match=f"round {number}: token|round {number + 1}: token|cluster"):
        judge.assert_representatives_right(found._replace(assignments=assignments), case)


def test_another_token_of_a_cluster_is_found():
    case, found = good("ordinary", tokens=24, keep=3)
    gone = next(token for token in range(24) if token not in found.indices.tolist())
    for place in range(3):
        indices = found.indices.clone()
        indices[place] = gone
        with pytest.raises(Mismatch, match=r"must keep one of|distinct|is kept in place"):
            judge.assert_representatives_right(found._replace(indices=indices.sort().values), case)


@pytest.mark.parametrize(("indices", "says"), [
    ([0, 1, 2, 3, 4], "shape"), ([0, 1, 1, 3, 4, 5], "distinct"), ([5, 4, 3, 2, 1, 0], "ascending"),
    ([0, 1, 2, 3, 4, 20], "0..19"), ([-1, 1, 2, 3, 4, 5], "0..19"),
])
def test_indices_out_of_form_are_found(indices, says):
    case, found = good()
    with pytest.raises(Mismatch, match=says):
        judge.assert_representatives_right(found._replace(indices=torch.tensor(indices)), case)


def test_ties_out_of_order_are_found():
    """For equal keys, a choice of other than the oldest token, or other than the first cluster, is wrong."""
    case = SegmentCase.of(torch.ones(1, 6, 16), 3)
    found = select_representatives(**case.inputs)
    judge.assert_representatives_right(found, case)
    with pytest.raises(Mismatch, match="must keep one of|first must be kept"):
        judge.assert_representatives_right(found._replace(indices=torch.tensor([1, 2, 3])), case)
    with pytest.raises(Mismatch, match="first must be kept"):
        judge.assert_representatives_right(found._replace(indices=torch.tensor([0, 2, 3])), case)
    with pytest.raises(Mismatch, match="round 0"):
        judge.assert_representatives_right(found._replace(assignments=found.assignments + 1), case)


def test_a_near_token_in_place_of_an_empty_cluster_is_found():
    key = torch.zeros(1, 6, 16)
    key[0, :, 0] = torch.tensor([0.0, 9, 0, 1, 0, 3])
    case = SegmentCase.of(key, 3)
    found = select_representatives(**case.inputs)
    assert found.indices.tolist() == [0, 1, 5]
    with pytest.raises(Mismatch, match="is kept in place of an empty cluster, but"):
        judge.assert_representatives_right(found._replace(indices=torch.tensor([0, 3, 5])), case)


def test_a_count_that_is_one_off_is_found():
    generator = torch.Generator().manual_seed(2)
    case = SparsityCase.given(3 * torch.randn(2, 4, 16, generator=generator), torch.randn(2, 2, 12, 16))
    found = attention_sparsity(**case.inputs)
    thinkv_thoughts.assert_sparsity_right(found, case)
    for wrong in (found + 1 / 24, found - 1 / 24, found * 1.001, found.double(), found[:1]):
        with pytest.raises(Mismatch, match="sparsity"):
            thinkv_thoughts.assert_sparsity_right(wrong, case)
