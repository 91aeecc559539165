"""Tests of KeyDiff's checker on states: the bound of a sum that is carried from step to step is sound and tight, and
the checker detects states that carry it wrongly."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from kvtwin.conformance.cases.state_trace import StateTrace
from kvtwin.conformance.judge import lockstep
from kvtwin.conformance.judge.checkers import keydiff as judge
from kvtwin.conformance.judge.compare import Mismatch
from kvtwin.conformance.tool.emulate_keys import KeyMachine
from kvtwin.reference import keydiff


@pytest.fixture(autouse=True)
def keep_failures_out_of_the_tree(tmp_path, monkeypatch):
    monkeypatch.setenv("KVTWIN_FAILURES", str(tmp_path))


#: Just below half an ulp of 1.
LOST = 2.0**-24 * (1 - 2.0**-8)


def carried(keys: list[Tensor], victims: list[int], refresh: int, dtype=torch.float32) -> list[tuple[float, float]]:
    """A sum of normalised keys [D] to which keys are added one by one, and from which victims are subtracted (indices;
    -1: none). It is recomputed every `refresh` steps. Returns the largest error per step, absolute and relative to the
    bound."""
    machine, drift = KeyMachine("sequential"), judge.Drift(refresh)
    held: list[int] = []
    total, used = torch.zeros(1, 1, 1, len(keys[0]), dtype=dtype), []
    for step, victim in enumerate(victims):
        held.append(step)
        key = torch.stack([keys[i] for i in held])[None, None]
        if step and step % refresh == 0:
            total = machine.total(machine.unit(key)).to(dtype)
        else:
            total = (total.float() + machine.unit(key[:, :, -1:])).to(dtype)
        fresh = torch.zeros(1, 1, len(held), dtype=torch.bool)
        fresh[..., -1] = True
        exact = judge.Keys(key.double(), torch.ones_like(fresh))
        bound = drift.after(exact, fresh)
        error = (total.double() - exact.unit.sum(2, keepdim=True)).abs()
        used.append((float(error.max()), float((error / bound).max())))
        if victim >= 0:
            total = (total.float() - machine.unit(keys[victim][None, None, None])).to(dtype)
            held.remove(victim)
    return used


@pytest.mark.slow
@pytest.mark.parametrize("refresh", [1, 5, 64])
def test_a_carried_sum_stays_within_its_bound(refresh):
    generator = torch.Generator().manual_seed(refresh)
    worst = 0.0
    for spread in (1.0, 0.1, 1e-4):
        lead = torch.randn(16, generator=generator)
        keys = [lead + spread * torch.randn(16, generator=generator) for _ in range(150)]
        held: list[int] = []
        victims = []
        for step in range(len(keys)):
            held.append(step)
            place = int(torch.randint(len(held), (), generator=generator))
            victims.append(held.pop(place) if len(held) > 9 else -1)
        used = carried(keys, victims, refresh)
        assert all(share <= 1 for _, share in used), max(used)
        worst = max(worst, *(share for _, share in used))
    assert worst >= 0.01


def test_a_sum_made_to_drift_reaches_ten_percent_of_its_bound():
    """The sum is 1.5 in channel 0, where it loses half an ulp with each added key."""
    steps, basis = 60, torch.eye(16)
    first = [basis[0], 0.5 * basis[0] + 0.75**0.5 * basis[1]]
    goes, comes = [basis[2]] * steps, [LOST * basis[0] + basis[3]] * steps
    victims = [-1] * (2 + steps) + list(range(2, 2 + steps))
    used = carried(first + goes + comes, victims, refresh=1000)
    errors, shares = zip(*used, strict=True)
    assert errors[-1] > (steps - 5) * 2.0**-24, "the sum must drift"
    assert 0.1 <= shares[-1] <= 1


def test_a_sum_carried_in_bfloat16_is_caught():
    generator = torch.Generator().manual_seed(0)
    keys = [torch.randn(16, generator=generator) for _ in range(30)]
    used = carried(keys, [-1] * 8 + list(range(22)), refresh=10, dtype=torch.bfloat16)
    assert max(share for _, share in used) > 10


# States that carry ---------------------------------------------------------------------------------------------------


class Carrying(keydiff.KeyDiffState):
    """A float32 state that carries its sum over steps of one token, as an implementation may."""

    dtype_of_sum = torch.float32
    forgets = False  # whether evicted keys are not subtracted
    stale = False  # whether ranks use the sum from before the step

    def _append(self, query, key, value, real):
        one = key.shape[2] == 1 and hasattr(self, "_sum") and self._age < self.config.refresh
        self._carry = self._sum if one else None
        output = super()._append(query, key, value, real)
        self._age = self._age + 1 if one else 0
        gone = self._before["occupied"].sum(-1) > self.occupied.sum(-1)
        after = keydiff.normalized(keydiff.occupied_keys(self.key, self.occupied)).sum(2, keepdim=True)
        if one:
            before = keydiff.normalized(keydiff.occupied_keys(self._before["key"], self._before["occupied"]))
            left = before.sum(2, keepdim=True) - after
            self._sum = self._total - (0 if self.forgets else left * gone[..., None, None])
        else:
            self._sum = after
        self._sum = self._sum.to(self.dtype_of_sum).float()
        return output

    def _rank(self):
        keys = keydiff.occupied_keys(self.key, self.occupied)
        unit = keydiff.normalized(keys)
        if self._carry is None:
            self._total = unit.sum(2, keepdim=True)
        else:
            self._total = self._carry + (0 if self.stale else unit[:, :, self.config.budget:].sum(2, keepdim=True))
        length = self._total.norm(dim=-1).clamp_min(1e-30)
        rank = -(self._total * unit).sum(-1)
        self.score = (rank / length).masked_fill(~self.occupied, -torch.inf)
        return rank, self._newest(self.config.recent)


def drive(**changes) -> lockstep.Summary:
    state = type("KeyDiffState", (Carrying,), changes)
    config = (("budget", 6), ("block_size", 4), ("refresh", 5))
    trace = StateTrace(
        batch=2, key_value_heads=2, head_dim=16, method="keydiff", config=config, prompt=11, steps=25, seed=5,
    )
    return lockstep.run(trace, SimpleNamespace(KeyDiffState=state))


def test_a_state_that_carries_its_sum_is_right():
    summary = drive()
    assert summary.steps == 25 and summary.adjudicated == 0


@pytest.mark.parametrize("changes", [{"dtype_of_sum": torch.bfloat16}, {"forgets": True}, {"stale": True}], ids=str)
def test_a_state_that_carries_it_wrongly_is_caught(changes):
    with pytest.raises(Mismatch, match=r"score|kept"):
        drive(**changes)
