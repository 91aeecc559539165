"""SyncKV with the bank in host memory: results do not depend on when tokens are transferred.

Results are bitwise equal to those of the same state without offload, which other tests judge. On the CPU, a transfer is
done at once, or, in these tests, as late as possible. On a GPU, some tests delay the stream, and some replay steps from
a CUDA graph of one step, or of a number of steps that is not a multiple of the stride. Without a GPU, steps are
launched as a graph would contain them: the device, not the host, decides whether tokens are transferred. These tests
use the internals of our own state. So they do not test `offload` of another implementation, except for those that judge
a property.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from kvtwin.conformance.judge.checkers.synckv_state import Adapter
from kvtwin.conformance.judge.lockstep import Lockstep
from kvtwin.conformance.suite.synckv.synckv_offloaded import (
    CLUSTERS,
    OPTIONS,
    PROMPT,
    SIZES,
    Replayed,
    as_in_a_graph,
    assert_same,
    new,
    played,
    tokens,
)
from kvtwin.reference.synckv import HeadClusters, SyncKVConfig
from kvtwin.reference.synckv import SyncKVState as Reference

pytestmark = [pytest.mark.kind("equivalence"), pytest.mark.main]


@pytest.fixture(scope="module")
def expected(device: torch.device) -> list[Tensor]:
    return played(new(device, offload=False), device)


@pytest.mark.parametrize("replayed", [pytest.param(False, marks=pytest.mark.property("state")), True])
@pytest.mark.parametrize("exclude", [True, False])
def test_an_offloaded_state_keeps_step_with_float64(exclude, replayed, twins, device):
    config = SyncKVConfig(**OPTIONS, phase=int(replayed), offload=True, exclude_static=exclude)
    sizes = {**SIZES, "dtype": torch.float32, "device": device}
    made = Replayed if replayed else twins.optimized.synckv.SyncKVState
    both = Lockstep(
        made(config, CLUSTERS, **sizes), Reference(config, CLUSTERS, **{**sizes, "dtype": torch.float64}), Adapter()
    )
    if replayed:
        as_in_a_graph(both.tested, device)
    if exclude:
        both.prefill(*tokens(1, device, 5))
    for step in range(4):
        both.step(*tokens(2 + step, device))
    both.reset()
    both.step(*tokens(20, device))


@pytest.mark.kind("bad_input")
@pytest.mark.filterwarnings("ignore:The CUDA Graph is empty")
def test_what_cannot_be_captured(device):
    """A prompt, which allocates the bank, and a first token without a prompt raise errors and leave the state
    unchanged."""
    if device.type != "cuda":
        return
    state = new(device)
    for given in (tokens(1, device, PROMPT), tokens(2, device)):
        call = state.prefill if given[0].dim() == 4 else state.step
        refused = pytest.raises(RuntimeError, match="cannot be captured|before a graph is captured")
        with refused, torch.cuda.graph(torch.cuda.CUDAGraph()):
            call(*given)
    assert (state.tokens_seen, state.host_bytes()) == (0, 0)


@pytest.mark.property("state")
@pytest.mark.claim("SK-7")
def test_a_token_that_left_comes_back(twins, device):
    """A token returns to the pool after another token used its place, and some tokens are chosen before they are in the
    bank. The value of token i is e_i, and the query of the other head is zero. So its output shows the tokens that it
    attends to: the one chosen at the previous step, and its own."""
    state = twins.optimized.synckv.SyncKVState(
        SyncKVConfig(1, 0.0, 1, 1, max_tokens=10, offload=True), HeadClusters((0, 0), (0,)), batch=1, query_heads=2,
        key_value_heads=2, head_dim=16, dtype=torch.float32, device=device,
    )
    unit = torch.eye(16, device=device)
    prompt = unit[:4].expand(1, 2, 4, 16)

    def query(wanted: int) -> Tensor:
        return torch.stack((9 * unit[wanted], 0 * unit[wanted]))[None]

    state.prefill(query(0)[:, :, None].expand(1, 2, 4, 16), prompt, prompt)
    before = 0
    for wanted in (1, 2, 0, 7, 8, 1):
        newest = state.tokens_seen
        own = unit[newest].expand(1, 2, 16)
        output = state.step(query(wanted), own, own)
        assert (output[0, 1] > 0).nonzero()[:, 0].tolist() == [before, newest]
        before = wanted


# Memory --------------------------------------------------------------------------------------------------------------


@pytest.mark.kind("bad_input")
@pytest.mark.parametrize("start", ["prompt", "step"])
def test_without_host_memory_there_is_an_error_and_the_state_is_as_it_was(start, device, expected):
    state = new(device)
    allocate = state._offload.transfers.allocate
    asked = []

    def refuse(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        asked.append(shape)
        if len(asked) == 2:
            raise MemoryError("no more pinned memory")
        return allocate(shape, dtype)

    state._offload.transfers.allocate = refuse
    with pytest.raises(MemoryError, match=r"3584 bytes of the host's memory .*no more pinned memory.*as it was"):
        state.prefill(*tokens(1, device, PROMPT)) if start == "prompt" else state.step(*tokens(1, device))
    assert (state.tokens_seen, state.host_bytes(), bool(state.occupied.any())) == (0, 0, False)
    state._offload.transfers.allocate = allocate
    assert_same(played(state, device), expected)


@pytest.mark.kind("bad_input")
@pytest.mark.parametrize("value", [1, None, "host"])
def test_offload_is_a_flag(value):
    with pytest.raises(TypeError, match="offload must be a bool"):
        SyncKVConfig(4, offload=value)
