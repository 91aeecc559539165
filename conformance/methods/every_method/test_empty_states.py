"""Whether a state knows that it is empty, and what a reset and an error in a prompt leave.

`prefill` reads the number of tokens from the device, which waits for it, unless the host has seen all that happened
since the state was reset.

These tests check our own states for any --kv-impl (see test_twins.py).
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch

from kvtwin.conformance import discovery
from kvtwin.conformance.cases import tiny
from kvtwin.conformance.discovery import Pair
from kvtwin.conformance.judge import checkers
from kvtwin.conformance.judge.compare import assert_same
from kvtwin.optimized._common import state as states
from kvtwin.optimized._common.prompts import prompt_selection

pytestmark = pytest.mark.whole

every_state = pytest.mark.parametrize(("pair", "options"), tiny.states(), ids=str)
Reads = Callable[[], int]


def prefill(state: Any, device: torch.device) -> None:
    tokens = tiny.prompt(device, seed=1)
    state.prefill(*tokens, **checkers.extras(state, *tokens))


def step(state: Any, device: torch.device) -> None:
    tokens = tiny.token(device, seed=2)
    state.step(*tokens, **checkers.extras(state, *tokens))


@pytest.fixture
def reads(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> Reads:
    """How often the number of tokens was read from the device."""
    count = 0
    assert pair.state is not None
    owners = [getattr(pair.optimized, pair.state.__name__)]
    owners += [member for name, member in vars(pair.optimized).items() if name.endswith("Scorer")]
    for owner in owners:
        found = owner.tokens_seen.fget

        def counted(self: Any, found: Any = found) -> int:
            nonlocal count
            count += 1
            seen: int = found(self)
            return seen

        monkeypatch.setattr(owner, "tokens_seen", property(counted))
    return lambda: count


def captured(monkeypatch: pytest.MonkeyPatch, call: Callable[[], None]) -> None:
    """`call`, while the base class believes that a CUDA graph is captured."""
    with monkeypatch.context() as patch:
        patch.setattr(states, "capturing", lambda _: True)
        call()


@every_state
def test_a_new_or_reset_state_takes_a_prompt_without_reading_the_device(pair, options, device, reads):
    state = tiny.new_state(pair, pair.optimized, device, **options)
    prefill(state, device)
    state.reset()
    prefill(state, device)
    assert reads() == 0
    assert state.tokens_seen == tiny.SLOTS and reads() > 0


@pytest.mark.parametrize(("pair", "options", "change"), [
    (pair, options, change) for pair, options in tiny.states() for change in ("prefill", "step", "append_block")
    if hasattr(pair.state, change)
], ids=str)
def test_a_state_that_has_tokens_refuses_a_prompt(pair, options, change, device):
    state = tiny.new_state(pair, pair.optimized, device, **options)
    if change == "prefill":
        prefill(state, device)
    elif change == "step":
        step(state, device)
    else:
        state.append_block(*tiny.prompt(device, seed=1))
    with pytest.raises(RuntimeError, match="empty state"):
        prefill(state, device)


@every_state
def test_a_state_in_a_graph_is_read(pair, options, device, reads, monkeypatch):
    """The host does not see the steps of replays, not even those after a reset."""
    state = tiny.new_state(pair, pair.optimized, device, **options)
    captured(monkeypatch, lambda: step(state, device))
    state.reset()
    prefill(state, device)
    assert reads() > 0


@every_state
def test_a_reset_that_is_captured_has_not_happened_yet(pair, options, device, reads, monkeypatch):
    state = tiny.new_state(pair, pair.optimized, device, **options)
    captured(monkeypatch, state.reset)
    prefill(state, device)
    assert reads() > 0


@every_state
def test_a_shallow_copy_shares_what_the_host_has_seen(pair, options, device):
    """It has the same buffers."""
    state = tiny.new_state(pair, pair.optimized, device, **options)
    prefill(copy.copy(state), device)
    with pytest.raises(RuntimeError, match="empty state"):
        prefill(state, device)


@every_state
def test_a_reset_state_is_a_new_one(pair, options, device):
    """A prompt of two tokens and three steps leave the same bits."""
    used, new = (tiny.new_state(pair, pair.optimized, device, **options) for _ in range(2))
    prefill(used, device)
    step(used, device)
    used.reset()
    query, key, value = (tensor[:, :, :2] for tensor in tiny.prompt(device, seed=5))
    for number in range(4):
        outputs = []
        for state in (used, new):
            given = (query, key, value) if number == 0 else tiny.token(device, seed=5 + number)
            call = state.prefill if number == 0 else state.step
            outputs.append(call(*given, **checkers.extras(state, *given)))
        assert_same(outputs[0], outputs[1], what=f"output {number}")
        for name in ("occupied", "positions", "score"):
            if hasattr(new, name):
                assert_same(getattr(used, name), getattr(new, name), what=f"{name} after {number}")


@pytest.mark.parametrize("name", ["longflow", "snapkv"])
@pytest.mark.parametrize("failing", ["choose", "fill"])
def test_an_error_behind_the_attention_of_a_prompt_is_noticed(name, failing, device, monkeypatch):
    pair = next(pair for pair in discovery.methods() if pair.name == name)
    options = {"block_size": tiny.SLOTS} if name == "snapkv" else {}
    state = tiny.new_state(pair, pair.optimized, device, **options)

    def fail(*_: Any) -> None:
        raise torch.OutOfMemoryError

    monkeypatch.setattr(prompt_selection, failing, fail)
    with pytest.raises(torch.OutOfMemoryError):
        prefill(state, device)
    with pytest.raises(RuntimeError, match="incomplete"):
        step(state, device)
