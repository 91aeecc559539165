"""The observations on attention in SyncKV's paper, measured on the fixture model (claims SK-13).

Each measured number is a share of thousands of tokens. It must lie in an interval that allows for rounding on other
machines.
"""

from __future__ import annotations

from functools import cache
from itertools import combinations, pairwise

import pytest
import torch
from torch import Tensor

from kvtwin.fixtures.decoder import causal_attention
from kvtwin.fixtures.load import load_model, load_text, load_trace
from kvtwin.reference.synckv import cluster_heads, head_similarity, overlap
from kvtwin.reference.synckv.sets import best_of

pytestmark = pytest.mark.kind("claims")

K = 32
#: The last tokens of each text whose attention is compared.
LOOKED = 48


def weights(query: Tensor, key: Tensor, last: int) -> tuple[Tensor, Tensor]:
    """Pooled log-weights [Hkv, last, T] of the last tokens, and the causal mask of each [last, T]."""
    total, heads = key.shape[2], key.shape[1]
    logit = query[:, :, -last:].unflatten(1, (heads, -1)) @ key.transpose(2, 3)[:, :, None] * query.shape[-1] ** -0.5
    seen = torch.ones(total, total, dtype=torch.bool).tril()[-last:]
    return logit.masked_fill(~seen, -torch.inf).log_softmax(-1).amax(2)[0], seen


@cache
def best() -> Tensor:
    """The K best tokens of each layer and KV head of the capture, at the prompt's last token and at all steps."""
    capture = load_trace("capture")
    found = []
    for layer in capture.metadata["layers"]:
        query, key = (capture.tensors[f"{layer}.{name}"].float() for name in ("query", "key"))
        weight, seen = weights(query, key, capture.metadata["steps"] + 1)
        found.append(best_of(weight, seen.expand(weight.shape), K))
    return torch.stack(found)                                                           # [layers, Hkv, steps + 1, K]


def since_the_prompt(step: int) -> float:
    return float(overlap(best()[:, :, step], best()[:, :, 0]).mean())


def apart(steps: int) -> float:
    """The mean overlap of sets that are `steps` apart."""
    return float(overlap(best()[:, :, :-steps].contiguous(), best()[:, :, steps:].contiguous()).mean())


def chance(step: int) -> float:
    return K / (load_trace("capture").metadata["prompt"] + step)


@pytest.mark.claim("SK-13a")
def test_attention_drifts():
    """The overlap is 0.51, 0.44, 0.34, 0.14, 0.10, 0.06 and 0.02 after 1, 5, 20, 50, 100, 200 and 320 steps. At the
    end, the prompt's tokens are chosen less often than by chance."""
    found = [since_the_prompt(step) for step in (1, 5, 20, 50, 100, 200, 320)]
    assert all(later < earlier for earlier, later in pairwise(found)), found
    assert 0.12 < found[3] < 0.16
    assert found[-1] < chance(320)


@pytest.mark.claim("SK-13a")
def test_drift_rejects_that_30_percent_are_left_after_50_steps():
    assert since_the_prompt(50) < 0.2
    assert since_the_prompt(20) > 0.3


@pytest.mark.claim("SK-13b")
def test_adjacent_steps_share_about_half():
    """0.55. For sets 50 steps apart it is 0.14, and for two random sets 0.06 to 0.17."""
    assert 0.52 < apart(1) < 0.58
    assert apart(1) > 3 * apart(50)
    assert apart(1) > apart(5) > apart(20) > apart(50)


@pytest.mark.claim("SK-13b")
def test_locality_rejects_that_a_set_is_good_for_five_steps():
    """After the stride of section 5.1, 5 steps, less than half of the set is left."""
    assert 0.42 < apart(5) < 0.48


@cache
def similarities() -> tuple[Tensor, Tensor]:
    """Similarities of pairs of different heads: within a layer, and of different layers."""
    layers, heads = best().shape[:2]
    flat = best().flatten(0, 1)
    same, other = [], []
    for one, two in combinations(range(layers * heads), 2):
        (same if one // heads == two // heads else other).append(overlap(flat[one], flat[two]).mean())
    return torch.stack(same), torch.stack(other)


@pytest.mark.claim("SK-13c")
def test_heads_of_one_layer_are_hardly_more_alike_than_those_of_others():
    """The means are 0.379 and 0.364, while the pairs within a layer range from 0.23 to 0.62."""
    same, other = similarities()
    assert 0.36 < float(same.mean()) < 0.39
    assert 0 < float(same.mean() - other.mean()) < 0.03 < float(same.std())


@pytest.mark.claim("SK-13d")
def test_some_heads_of_most_layers_are_alike():
    """In three of four layers, the most similar pair (0.62, 0.57 and 0.43) is more similar than pairs of different
    layers are on average. In the fourth layer (0.35) it is not."""
    same, other = similarities()
    closest = same.unflatten(0, (len(best()), -1)).amax(1)
    assert [bool(pair > other.mean()) for pair in closest] == [True, True, True, False]


@pytest.mark.claim("SK-13d")
def test_likeness_rejects_that_it_holds_for_every_pair():
    same, other = similarities()
    assert float((same < other.mean()).double().mean()) > 0.25


@cache
def clusterings() -> list[list[tuple[int, ...]]]:
    """The labels of each layer for two unrelated texts, with two clusters."""
    model = load_model(torch.float32)
    found = []
    for name in ("alice", "paradise_lost"):
        passage = b"\0" + load_text(name)[20_000:20_319]
        tokens = torch.frombuffer(bytearray(passage), dtype=torch.uint8)[None].long()
        seen: dict[int, Tensor] = {}

        def observe(
            layer: int, hidden: Tensor, query: Tensor, key: Tensor, value: Tensor, seen: dict[int, Tensor] = seen
        ) -> None:
            weight, mask = weights(query, key, LOOKED)
            seen[layer] = head_similarity(weight.transpose(0, 1).contiguous(), K, occupied=mask)

        with torch.no_grad():
            model(tokens, attend=causal_attention, observe=observe)
        found.append([cluster_heads(seen[layer], 2).labels for layer in sorted(seen)])
    return found


def agreement(one: list[tuple[int, ...]], other: list[tuple[int, ...]]) -> float:
    """The share of pairs of heads that are in one cluster in both labellings, or in different clusters in both."""
    pairs = list(combinations(range(len(one[0])), 2))
    same = [(a[i] == a[j]) == (b[i] == b[j]) for a, b in zip(one, other, strict=True) for i, j in pairs]
    return sum(same) / len(same)


@pytest.mark.claim("SK-13e")
def test_clusters_of_two_texts_mostly_agree():
    one, other = clusterings()
    assert 0.7 < agreement(one, other) < 1, (one, other)


@pytest.mark.claim("SK-13e")
def test_stability_rejects_that_clusters_are_the_same():
    one, other = clusterings()
    assert any(a != b for a, b in zip(one, other, strict=True))
