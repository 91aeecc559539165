"""Launches that need the same code use one kernel, so that fewer are compiled: a constant that only another launch of
the call uses is the same for all."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch

from kvtwin import optimized
from kvtwin.conformance import discovery
from kvtwin.conformance.cases import tiny
from kvtwin.conformance.judge import checkers
from kvtwin.conformance.lab import compile_only
from kvtwin.optimized import longflow
from kvtwin.optimized._common.block_cache import step
from kvtwin.optimized.longflow import _ops

PAIRS = {pair.name: pair for pair in discovery.methods()}


class Launched:
    """Stands in for a kernel: keeps the constants of each launch and computes nothing."""

    def __init__(self) -> None:
        self.constants: list[dict[str, Any]] = []

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        return lambda *arguments, **options: self.constants.append(options)


def of_a_step(method: str, device: torch.device, **options: Any) -> list[dict[str, Any]]:
    """The constants of a step's launches, if a second kernel chooses the slot."""
    attends, chooses = Launched(), Launched()
    with compile_only.fused_as(PAIRS[method], False), mock.patch.object(step, "step_kernel", attends), \
            mock.patch.object(step, "finish_kernel", chooses):
        state = tiny.new_state(PAIRS[method], checkers.module(optimized, PAIRS[method]), device, **options)
        state.step(*tiny.token(device, seed=0))
    return attends.constants + chooses.constants


def test_steps_of_rules_that_weigh_share_the_kernel_of_attention(device):
    """H2O, VATP and TOVA rank by weights: only the second kernel differs."""
    attends, chooses = zip(*(of_a_step(method, device) for method in ("h2o", "vatp", "tova")), strict=True)
    assert attends[0] == attends[1] == attends[2]
    assert len({one["RULE"] for one in chooses}) == 2
    assert [one["MAGNITUDE"] for one in chooses] == [False, True, False]


def test_a_rule_that_does_not_weigh_keeps_no_logits(device):
    weighs, _ = of_a_step("h2o", device)
    ages, _ = of_a_step("streaming_llm", device)
    assert step.RULES["sum"] == weighs["RULE"] and step.RULES["age"] == ages["RULE"]


@pytest.mark.parametrize("at_once", [False, True], ids=["ranks later", "ranks at once"])
def test_longflow_attends_by_one_kernel_in_any_number_of_splits(at_once, device, monkeypatch):
    """Only a kernel that also ranks the slots depends on the number of splits. Without an arrival, it does not matter
    to attention whether heads decide together."""
    attends = Launched()
    monkeypatch.setattr(_ops, "attend_kernel", attends)
    monkeypatch.setattr(_ops, "score_kernel", Launched())
    monkeypatch.setattr(_ops, "choose_kernel", Launched())
    monkeypatch.setattr(_ops, "fused", lambda *_: at_once)
    query, key = torch.zeros(1, 2, 16, device=device), torch.zeros(1, 1, 40, 16, device=device)
    for splits, per_head in ((2, False), (2, True), (40, False)):
        work = _ops._Work(16, 0, splits, 16, splits, 16)
        monkeypatch.setattr(_ops, "_cut", lambda *_, work=work: work)
        occupied = torch.ones((1, 1, 40) if per_head else (1, 40), dtype=torch.bool, device=device)
        longflow.decode_attention(query, key, key, occupied, per_head=per_head)
    few, per_head, many = attends.constants
    assert few == per_head
    assert (few == many) == (not at_once)
