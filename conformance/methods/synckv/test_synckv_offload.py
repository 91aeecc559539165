"""SyncKV with the bank in host memory: results do not depend on when tokens are transferred:
what only our own sides promise.
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

from kvtwin.conformance.suite.synckv.synckv_offloaded import (
    CLUSTERS,
    OPTIONS,
    SIZES,
    STEPS,
    Both,
    Late,
    Noted,
    Slow,
    assert_same,
    new,
    played,
    synchronize,
    tokens,
    with_transfers,
)
from kvtwin.optimized._common.launch import INTERPRETED
from kvtwin.optimized.synckv import SyncKVState, _offload
from kvtwin.optimized.synckv._transfers import side_streams
from kvtwin.reference.synckv import SyncKVConfig

pytestmark = [pytest.mark.kind("equivalence"), pytest.mark.main]

#: Steps that are launched directly (0), or graphs of so many steps.
FORMS = pytest.mark.parametrize("form", (0, 1, 4) if torch.cuda.is_available() else (0, 1))


@pytest.fixture(scope="module")
def expected(device: torch.device) -> list[Tensor]:
    return played(new(device, offload=False), device)


@pytest.mark.claim("SK-18")
@FORMS
def test_offloaded_results_equal_resident_results(form, device, expected):
    state = new(device)
    assert_same(played(state, device, form), expected)
    if form:
        state.reset()
        assert_same(played(state, device), expected)


@pytest.mark.claim("SK-16")
@FORMS
def test_results_do_not_depend_on_late_transfers(form, device, expected):
    late = Late()
    state = with_transfers(new(device), late)
    assert_same(played(state, device, form), expected)
    if not form:
        assert late.late == 1 + (STEPS - 1) // 2, "the last transfer must still be pending"


@FORMS
def test_places_that_wait_for_tokens_may_hold_anything(form, device, expected):
    """NaN in every place of the pool that is not in the current set, and in the slots that new tokens have left."""
    state = new(device)

    def spoil() -> None:
        away = state._offload
        slot = torch.arange(away.key.shape[2] + 1, device=device)
        used = (slot < 0).scatter(0, away.places.flatten().where(away.places.flatten() >= 0, slot[-1]), True)
        # The slots of the newest tokens are still read; only their copies are in transfer.
        newest = state._counters[5].where(state._due[0] != 0, state._counters[3])
        used = used | ((slot >= newest) & (slot < newest + away.stride))
        for tensor in (away.key, away.value):
            tensor.masked_fill_(~used[:-1, None], torch.nan)

    assert_same(played(with_transfers(state, Late(spoil)), device, form), expected)


@pytest.mark.parametrize("form", [0, 1])
def test_only_tokens_that_are_not_resident_are_read(form, device, expected):
    """The bank has NaN for all tokens in the pool while a step and its transfers run."""
    state, poisoned = new(device), []

    @contextmanager
    def watched(state: Any) -> Iterator[None]:
        away = state._offload
        synchronize(device)
        held = away.tokens[away.tokens >= 0].cpu()
        whole = [bank.clone() for bank in away.bank]
        for bank in away.bank:
            bank[:, :, held] = torch.nan
        yield
        state.join()
        synchronize(device)
        poisoned.append(len(held))
        for bank, before in zip(away.bank, whole, strict=True):
            bank[:, :, held] = before[:, :, held]

    assert_same(played(state, device, form, watched), expected)
    assert poisoned == [3] * STEPS


@FORMS
@pytest.mark.parametrize("programs", [1, 24])
def test_a_slow_stream_changes_nothing(programs, form, device, expected, monkeypatch):
    """On a GPU, the stream sleeps, and a single program transfers everything. Not applicable on the CPU."""
    if device.type != "cuda":
        return
    monkeypatch.setattr(_offload, "PROGRAMS", programs)
    state = new(device)
    state._offload.transfers = Slow(device)
    assert_same(played(state, device, form), expected)


@pytest.mark.parametrize("share", [-1, 10], ids=["all programs", "few of them"])
def test_transfer_programs_fetch_every_token(share, device, expected, monkeypatch):
    """Three programs, or two of them, share up to six units. A unit is one token of one head."""
    for name, value in {"PROGRAMS": 3, "FEW": 2, "SHARE": share, "BLOCK": 1}.items():
        monkeypatch.setattr(_offload, name, value)
    assert_same(played(new(device), device), expected)


@FORMS
def test_layers_share_a_stream(form, device, expected):
    """Two layers of different phases. A transfer for one may delay the other, but must not change its results."""
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
    """torch reuses a small pool of streams. If the caller's stream were also the transfer stream, transfers would wait
    for its computation."""
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


def test_a_reset_frees_the_host_s_memory(device, expected):
    """Even while tokens are being transferred. Afterwards the state behaves like a new one."""
    state = with_transfers(new(device), Late())
    assert state.host_bytes() == 0, "a state without tokens needs no bank"
    played(state, device)
    assert state.host_bytes() == 2 * 2 * 14 * 16 * 4
    banks = [weakref.ref(bank) for bank in state._offload.bank]
    state.reset()
    state._offload.transfers.own.release()
    gc.collect()
    assert state.host_bytes() == 0
    assert [bank() for bank in banks] == [None, None]
    assert not bool(state._offload.banks.any()), "a replay of a graph must not write to memory that was freed"
    assert_same(played(state, device), expected)
