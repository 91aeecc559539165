"""The command that decodes many tokens: each of its checks fails for a state with the matching error."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from kvtwin.conformance import discovery
from kvtwin.conformance.lab import endurance
from kvtwin.reference.longflow import LongFlowState

PAIR = {pair.name: pair for pair in discovery.methods()}["longflow"]


def run(state):
    return endurance.endure(PAIR, SimpleNamespace(LongFlowState=state), torch.device("cpu"), 500)


class Remembers(LongFlowState):
    def step(self, *tokens):
        self.past = (*getattr(self, "past", ()), tokens[0])
        return super().step(*tokens)


class Miscounts(LongFlowState):
    @property
    def tokens_seen(self):
        return super().tokens_seen - (super().tokens_seen > 300)


class RepeatsPositions(LongFlowState):
    def step(self, *tokens):
        output = super().step(*tokens)
        self.positions.remainder_(8)
        return output


class DependsOnItsAddress(LongFlowState):
    """As a kernel does that reads memory beyond its own."""

    def step(self, *tokens):
        return super().step(*tokens) + id(self) % 2**20


class KeepsAfterReset(LongFlowState):
    steps = 0

    def step(self, *tokens):
        self.steps += 1
        return super().step(*tokens) + max(0, self.steps - 498)  # what it does before the reset is right


class LosesPrecision(LongFlowState):
    """As a sum does that carries its rounding errors along."""

    def step(self, *tokens):
        return super().step(*tokens) * (1 + 1e-6 * self.tokens_seen)


class ForgetsTokens(LongFlowState):
    def step(self, *tokens):
        output = super().step(*tokens)
        if self.tokens_seen > 400:
            self.occupied[:, 0] = False
        return output


@pytest.mark.slow
@pytest.mark.parametrize(("state", "says"), [
    (Remembers, "memory grows"), (Miscounts, "expected tokens_seen = "), (KeepsAfterReset, "after reset"),
    (RepeatsPositions, "expected distinct positions"), (DependsOnItsAddress, "differ from those of a copy"),
    (LosesPrecision, "are not attention to the tokens held"), (ForgetsTokens, "tokens as after half of the steps"),
], ids=lambda value: getattr(value, "__name__", ""))
def test_a_faulty_state_fails(state, says):
    with pytest.raises(endurance.Failed, match=says):
        run(state)


@pytest.mark.parametrize("pair", discovery.methods(), ids=str)
def test_every_method_has_a_state_to_endure(pair):
    """Some configs need more than a budget."""
    state = endurance.new_state(pair, pair.reference, torch.device("cpu"), 500)
    assert state.tokens_seen == 0


def test_a_right_state_passes(capsys):
    assert endurance.main(["longflow", "--side", "reference", "--steps", "500"]) == 0
    assert "longflow (reference, cpu): tokens 546, held 64" in capsys.readouterr().out


@pytest.mark.parametrize(("arguments", "says"), [
    (["none"], "no method none"), (["longflow", "--steps", "499"], "--steps must be at least 500"),
])
def test_wrong_arguments_are_usage_errors(arguments, says, capsys):
    with pytest.raises(SystemExit, match="2"):
        endurance.main(arguments)
    assert says in capsys.readouterr().err
