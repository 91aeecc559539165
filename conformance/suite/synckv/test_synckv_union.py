"""SyncKV with union_clusters: heads that are not R-heads attend to the sets of all clusters (Algorithm 1, line 23)."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from kvtwin.conformance.cases.synckv_cases import RATIOS
from kvtwin.conformance.judge.checkers.synckv_state import Adapter
from kvtwin.conformance.judge.lockstep import Lockstep
from kvtwin.conformance.suite.synckv.synckv_offloaded import as_in_a_graph
from kvtwin.optimized.synckv import _offload, _step
from kvtwin.reference.synckv import HeadClusters, SyncKVConfig, SyncKVState

pytestmark = [pytest.mark.kind("equivalence"), pytest.mark.property("state")]

SIDES = pytest.mark.parametrize("side", ("reference", "optimized"))
#: Head 3 represents itself and head 0, head 1 itself and heads 2 and 4.
CLUSTERS = HeadClusters((0, 1, 1, 0, 1), (3, 1))
#: Three clusters, two of them with followers.
THREE = HeadClusters((0, 1, 1, 2, 2), (0, 2, 3))
SIZES = {"batch": 2, "query_heads": 5, "key_value_heads": 5, "head_dim": 16}


def tokens(seed: int, device: torch.device, *time: int, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    """query, key and value [B, H, *time, D]."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(2, 5, *time, 16, generator=generator).to(device, dtype) for _ in range(3)]


def lockstep(
    twins: Any, device: torch.device, clusters: HeadClusters, *, dtype: torch.dtype = torch.float32, **options: Any
) -> Lockstep:
    config = SyncKVConfig(clusters=len(clusters.representatives), scale=1.0, union_clusters=True, **options)
    return Lockstep(
        twins.optimized.synckv.SyncKVState(config, clusters, **SIZES, dtype=dtype, device=device),
        SyncKVState(config, clusters, **SIZES, dtype=torch.float64, device=device), Adapter(),
    )


class Shown:
    """A layer that shows the tokens that each head attends to: the value of token i is the unit vector e_i.

    Heads 0 and 1 represent head 2 and head 3. Their queries prefer the tokens in `wanted`. The queries of heads 2 and 3
    are zero, so all tokens that they attend to have equal weights.
    """

    def __init__(self, module: Any, device: torch.device, **options: Any) -> None:
        self.device = device
        self.state = module.SyncKVState(
            SyncKVConfig(clusters=2, max_tokens=16, scale=1.0, **options), HeadClusters((0, 1, 0, 1), (0, 1)), batch=1,
            query_heads=4, key_value_heads=4, head_dim=16, dtype=torch.float32, device=device,
        )

    def _tokens(self, count: int, wanted: list[list[int]], first: int) -> list[Tensor]:
        query = torch.zeros(1, 4, count, 16)
        for head, own in enumerate(wanted):
            query[0, head, -1, own] = torch.arange(len(own), 0, -1).float()
        unit = torch.eye(16)[None, None, first:first + count].expand(1, 4, count, 16)
        return [tensor.clone().to(self.device) for tensor in (query, unit, unit)]

    def prefill(self, count: int, *wanted: list[int]) -> None:
        self.state.prefill(*self._tokens(count, list(wanted), 0))

    def step(self, *wanted: list[int]) -> list[list[int]]:
        """Append a token, and return the tokens that heads 2 and 3 attend to."""
        output = self.state.step(*(
            tensor[:, :, 0] for tensor in self._tokens(1, list(wanted), self.state.tokens_seen)
        ))[0]
        seen = [(head > 0).nonzero()[:, 0].tolist() for head in output]
        assert seen[0] == seen[1] == list(range(self.state.tokens_seen)), "representatives must attend to every token"
        for head in (2, 3):
            weights = set(output[head][seen[head]].tolist())
            assert len(weights) == 1, "the other heads' weights must be equal"
            assert round(1 / weights.pop()) == len(seen[head]), "the other heads must attend to no free slot"
        return seen[2:]


@SIDES
@pytest.mark.parametrize("offload", [False, True])
def test_other_heads_attend_to_the_sets_of_all_clusters(side, offload, twins, device):
    """The sets of the clusters share token 1, which has a single weight, and tokens of the union are no longer attended
    to once no cluster selects them. Each cluster keeps its own sets."""
    shown = Shown(getattr(twins, side).synckv, device, k=2, stride=2, union_clusters=True, offload=offload)
    for _ in range(2):
        shown.prefill(6, [1, 5], [4, 1])
        assert shown.state.static[0].tolist() == [[1], [4]]
        assert shown.step([0], [0]) == [[1, 4, 5, 6]] * 2
        assert shown.step([3], [2]) == [[1, 4, 5, 6, 7]] * 2
        assert shown.state.chosen[0].tolist() == [[1, 3], [2, 4]]
        assert shown.step([0], [0]) == [[1, 2, 3, 4, 8]] * 2
        assert shown.step([4], [1]) == [[1, 2, 3, 4, 8, 9]] * 2
        assert shown.step([0], [0]) == [[1, 4, 10]] * 2
        shown.state.reset()
        assert shown.step([0], [0]) == [[0], [0]]
        shown.state.reset()


@SIDES
def test_other_heads_attend_to_the_sets_of_their_cluster_by_default(side, twins, device):
    shown = Shown(getattr(twins, side).synckv, device, k=2, stride=2)
    shown.prefill(6, [1, 5], [4, 1])
    assert shown.step([0], [0]) == [[1, 5, 6], [1, 4, 6]]


@pytest.mark.slow_on_cpu
@pytest.mark.parametrize("form", ["launched", "offloaded", "as in a graph"])
@pytest.mark.parametrize("exclude", [True, False])
def test_unions_keep_step_with_float64(form, exclude, twins, device, monkeypatch):
    """A prompt with padding on both sides, another order of rows in the middle of a stride, and a reset. Every loop has
    several rounds."""
    for module, name, value in [(_step, "UNITED", 2), (_offload, "CHUNK", 2), (_offload, "BLOCK", 1)]:
        monkeypatch.setattr(module, name, value)
    both = lockstep(
        twins, device, CLUSTERS, k=5, rho=0.3, stride=3, max_tokens=22, exclude_static=exclude,
        offload=form != "launched",
    )
    if form == "as in a graph":
        as_in_a_graph(both.tested, device)
    occupied = torch.ones(2, 12, dtype=torch.bool, device=device)
    occupied[0, :2] = occupied[0, 11:] = False
    both.prefill(*tokens(1, device, 12), occupied)
    for step in range(5):
        if step in (1, 4):
            both.reorder(torch.tensor([1, 0], device=device))
        both.step(*tokens(2 + step, device))
    both.reset()
    for step in range(5):
        both.step(*tokens(20 + step, device))


@given(
    seed=st.integers(0, 2**16), clusters=st.sampled_from((CLUSTERS, THREE)), k=st.integers(1, 12),
    rho=st.sampled_from(RATIOS),
    stride=st.integers(1, 3), prompt=st.integers(0, 9), steps=st.integers(1, 4), exclude=st.booleans(),
    offload=st.booleans(), dtype=st.sampled_from((torch.float32, torch.float16, torch.bfloat16)),
)
def test_any_union_keeps_step_with_float64(
    seed, clusters, k, rho, stride, prompt, steps, exclude, offload, dtype, twins, device
):
    both = lockstep(
        twins, device, clusters, dtype=dtype, k=k, rho=rho, stride=stride, max_tokens=14, exclude_static=exclude,
        offload=offload,
    )
    if prompt:
        both.prefill(*tokens(seed, device, prompt, dtype=dtype))
    for step in range(steps):
        both.step(*tokens(seed + 1 + step, device, dtype=dtype))


def test_the_union_of_one_cluster_is_its_set(twins, device):
    one = HeadClusters((0,) * 5, (2,))
    frames = []
    for union in (False, True):
        config = SyncKVConfig(3, stride=2, clusters=1, max_tokens=14, union_clusters=union)
        state = twins.optimized.synckv.SyncKVState(config, one, **SIZES, dtype=torch.float32, device=device)
        frames.append([state.prefill(*tokens(1, device, 8))])
        frames[-1] += [state.step(*tokens(2 + step, device)) for step in range(3)]
    assert all(torch.equal(left, right) for left, right in zip(*frames, strict=True))


@pytest.mark.kind("bad_input")
def test_union_clusters_is_a_bool():
    with pytest.raises(TypeError, match="union_clusters must be a bool, got int"):
        SyncKVConfig(4, union_clusters=1)
