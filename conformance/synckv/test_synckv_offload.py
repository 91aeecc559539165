"""SyncKV with the bank in the host's memory: whenever tokens come, results are those of keys and values at hand.

Equal to the bit to the same state without offload, which is judged elsewhere. On the CPU a transfer is done at once, or
here as late as it may be; on a GPU its stream is also made to sleep, and steps are also replays of a graph, of one step
or of some that the strides do not fit into. Without a GPU, steps that are launched as a graph would hold them: the
device, not the host, says whether tokens travel. These tests reach into our own state, so another implementation's
`offload` is not under test here, but for the first one.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor

from kvtwin.conformance.judge.checkers.synckv_state import Adapter
from kvtwin.conformance.judge.lockstep import Lockstep
from kvtwin.conformance.synckv.synckv_offloaded import (
    CLUSTERS,
    OPTIONS,
    PROMPT,
    SIZES,
    STEPS,
    Both,
    Late,
    Noted,
    Replayed,
    Slow,
    as_in_a_graph,
    assert_same,
    new,
    played,
    settle,
    tokens,
    with_transfers,
)
from kvtwin.optimized._common.launch import INTERPRETED
from kvtwin.optimized.synckv import SyncKVState, _offload
from kvtwin.optimized.synckv._transfers import side_streams
from kvtwin.reference.synckv import HeadClusters, SyncKVConfig
from kvtwin.reference.synckv import SyncKVState as Reference

pytestmark = pytest.mark.kind("equivalence")

#: Steps as they are launched, or graphs of so many.
FORMS = pytest.mark.parametrize("form", (0, 1, 4) if torch.cuda.is_available() else (0, 1))


@pytest.fixture(scope="module")
def expected(device: torch.device) -> list[Tensor]:
    return played(new(device, offload=False), device)


@FORMS
def test_results_are_those_of_all_tokens_at_hand(form, device, expected):
    state = new(device)
    assert_same(played(state, device, form), expected)
    if form:
        state.reset()
        assert_same(played(state, device), expected)


@pytest.mark.parametrize("replayed", [False, True])
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


@FORMS
def test_transfers_as_late_as_may_be(form, device, expected):
    late = Late()
    state = with_transfers(new(device), late)
    assert_same(played(state, device, form), expected)
    if not form:
        assert late.late == 1 + (STEPS - 1) // 2, "the last one is still under way"


@FORMS
def test_places_that_wait_for_tokens_may_hold_anything(form, device, expected):
    """NaN in every place of the pool that the set in use has not, and in the slots that new tokens have left."""
    state = new(device)

    def spoil() -> None:
        away = state._offload
        slot = torch.arange(away.key.shape[2] + 1, device=device)
        used = (slot < 0).scatter(0, away.places.flatten().where(away.places.flatten() >= 0, slot[-1]), True)
        # What the newest tokens lie in is still to be read; on its way is a copy.
        newest = state._counters[5].where(state._due[0] != 0, state._counters[3])
        used = used | ((slot >= newest) & (slot < newest + away.stride))
        for tensor in (away.key, away.value):
            tensor.masked_fill_(~used[:-1, None], torch.nan)

    assert_same(played(with_transfers(state, Late(spoil)), device, form), expected)


@pytest.mark.parametrize("form", [0, 1])
def test_only_tokens_that_are_not_resident_are_read(form, device, expected):
    """The bank holds NaN for all that is in the pool while a step, its transfers included, runs."""
    state, poisoned = new(device), []

    @contextmanager
    def watched(state: Any) -> Iterator[None]:
        away = state._offload
        settle(device)
        held = away.tokens[away.tokens >= 0].cpu()
        whole = [bank.clone() for bank in away.bank]
        for bank in away.bank:
            bank[:, :, held] = torch.nan
        yield
        state.join()
        settle(device)
        poisoned.append(len(held))
        for bank, before in zip(away.bank, whole, strict=True):
            bank[:, :, held] = before[:, :, held]

    assert_same(played(state, device, form, watched), expected)
    assert poisoned == [3] * STEPS


@FORMS
@pytest.mark.parametrize("programs", [1, 24])
def test_a_slow_stream_changes_nothing(programs, form, device, expected, monkeypatch):
    """On a GPU: the stream sleeps, and a single program has the whole wire to fill. On the CPU there is neither."""
    if device.type != "cuda":
        return
    monkeypatch.setattr(_offload, "PROGRAMS", programs)
    state = new(device)
    state._offload.transfers = Slow(device)
    assert_same(played(state, device, form), expected)


@pytest.mark.parametrize("share", [-1, 10], ids=["all programs", "few of them"])
def test_whoever_fetches_leaves_nothing_out(share, device, expected, monkeypatch):
    """Three programs, or two of them, have up to six units between them, a token of a head each."""
    for name, value in {"PROGRAMS": 3, "FEW": 2, "SHARE": share, "BLOCK": 1}.items():
        monkeypatch.setattr(_offload, name, value)
    assert_same(played(new(device), device), expected)


@FORMS
def test_layers_share_a_stream(form, device, expected):
    """Two layers of different phases; what comes for one may delay the other, and nothing else."""
    layers = [new(device, phase=phase) for phase in (0, 1)]
    if device.type == "cuda":
        for state in layers:
            state._offload.transfers = Slow(device)
    other = played(new(device, offload=False, phase=1), device)
    both = Both(layers)
    frames = played(both, device, form)
    assert_same([frame[:1] for frame in frames], expected)
    assert_same([frame[1:] for frame in frames], other)


@pytest.mark.skipif(INTERPRETED, reason="there are no streams without a GPU: run with --kv-device cuda")
def test_a_caller_may_compute_on_any_stream(device, expected):
    """torch hands out the same streams over and over. Were the caller's the one that tokens come by, they would wait in
    line."""
    for stream in side_streams(device):
        state = new(device)
        state._offload.transfers = Noted(device)
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            frames = played(state, device)
        torch.cuda.current_stream().wait_stream(stream)
        assert_same(frames, expected)
        assert state._offload.transfers.streams
        assert stream not in state._offload.transfers.streams


@pytest.mark.kind("bad_input")
@pytest.mark.filterwarnings("ignore:The CUDA Graph is empty")
def test_what_cannot_be_captured(device):
    """A prompt, which makes the bank, and a first token without one: errors, and the state is as it was."""
    if device.type != "cuda":
        return
    state = new(device)
    for given in (tokens(1, device, PROMPT), tokens(2, device)):
        call = state.prefill if given[0].dim() == 4 else state.step
        refused = pytest.raises(RuntimeError, match="cannot be captured|before a graph is captured")
        with refused, torch.cuda.graph(torch.cuda.CUDAGraph()):
            call(*given)
    assert (state.tokens_seen, state.host_bytes()) == (0, 0)


def test_a_token_that_left_comes_back(device):
    """Its place was another's meanwhile; others are chosen as soon as they come, before they lie in the bank. Token i's
    value is e_i; the other head's query is zero, so its output shows what it attends to: what was chosen at the step
    before, and its own token."""
    state = SyncKVState(
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


def test_rows_are_reordered_while_tokens_are_on_their_way(device):
    frames = []
    for offload in (False, True):
        state = SyncKVState(
            SyncKVConfig(**OPTIONS, offload=offload), CLUSTERS, **{**SIZES, "batch": 2}, dtype=torch.float32,
            device=device,
        )
        if offload:
            with_transfers(state, Late())
        rows = [tokens(seed, device) for seed in range(20, 28)]
        for one, other in zip(rows[::2], rows[1::2], strict=True):
            frames.append(state.step(*(torch.cat(pair) for pair in zip(one, other, strict=True))))
            if state.tokens_seen == 2:
                state.reorder(torch.tensor([1, 0], device=device))
        frames += [state.key, state.value]
    assert_same(frames[len(frames) // 2:], frames[:len(frames) // 2])


# Memory --------------------------------------------------------------------------------------------------------------


def test_a_reset_frees_the_host_s_memory(device, expected):
    """Also one that comes while tokens are on their way; then the state starts anew."""
    state = with_transfers(new(device), Late())
    assert state.host_bytes() == 0, "no token, no bank"
    played(state, device)
    assert state.host_bytes() == 2 * 2 * 14 * 16 * 4
    banks = [weakref.ref(bank) for bank in state._offload.bank]
    state.reset()
    state._offload.transfers.own.release()
    gc.collect()
    assert state.host_bytes() == 0
    assert [bank() for bank in banks] == [None, None]
    assert_same(played(state, device), expected)


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
