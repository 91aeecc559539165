"""Tests of the checker of SyncKV's state: the faults that it must detect, and the choices that it must accept."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from kvtwin.conformance.judge.checkers.synckv_state import Adapter, best_candidates
from kvtwin.conformance.judge.compare import Mismatch
from kvtwin.conformance.judge.lockstep import Lockstep
from kvtwin.reference.synckv import HeadClusters, SyncKVConfig, SyncKVState

SIZES = {"batch": 2, "query_heads": 4, "key_value_heads": 2, "head_dim": 16}
CLUSTERS = HeadClusters((0, 0), (1,))


def tokens(seed: int, *time: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(2, heads, *time, 16, generator=generator) for heads in (4, 2, 2)]


def run(tested: type[SyncKVState], **options: Any) -> Lockstep:
    """A prompt, an anticipation, and a step that uses its choice, in float32 against float64."""
    config = SyncKVConfig(4, stride=2, clusters=1, max_tokens=16, **options)
    both = Lockstep(
        tested(config, CLUSTERS, **SIZES, dtype=torch.float32, device="cpu"),
        SyncKVState(config, CLUSTERS, **SIZES, dtype=torch.float64, device="cpu"), Adapter(),
    )
    both.prefill(*tokens(1, 8))
    for step in range(3):
        both.step(*tokens(2 + step))
    return both


@pytest.mark.parametrize("exclude", [True, False])
def test_the_reference_in_float32_is_right(exclude):
    assert run(SyncKVState, exclude_static=exclude).summary.steps == 3


def swapped(mask: Tensor, fixed: Tensor) -> Tensor:
    """A set [B, N_r, S] in which the first token that is not fixed is replaced by the first token that is not in it."""
    mask = mask.clone()
    for row in mask.flatten(0, 1):
        inside = (row & ~fixed[0, 0]).nonzero()[:, 0]
        outside = (~row[:8]).nonzero()[:, 0]
        row[inside[0]], row[outside[0]] = False, True
    return mask


def sabotaged(what: str, change: Callable[[Any, Tensor], Tensor]) -> type[SyncKVState]:
    """A state that corrupts one of its tensors after the prompt or after an anticipation."""

    class Wrong(SyncKVState):
        def prefill(self, *given: Any, **named: Any) -> Tensor:
            output = super().prefill(*given, **named)
            if what == "prompt":
                self._chosen = change(self, self._chosen)
            if what == "static":
                self._static = change(self, self._static)
            return output

        def _anticipate(self, query: Tensor) -> None:
            super()._anticipate(query)
            if what == "anticipation":
                self._chosen = change(self, self._chosen)

    return Wrong


def emptied(state: Any, mask: Tensor) -> Tensor:
    return torch.zeros_like(mask)


@pytest.mark.parametrize("exclude", [True, False])
@pytest.mark.parametrize("what", ["prompt", "static", "anticipation"])
@pytest.mark.parametrize(
    "change", [lambda state, mask: swapped(mask, torch.zeros_like(mask)), emptied], ids=["another token", "none"]
)
def test_a_wrong_set_is_seen(what, change, exclude):
    with pytest.raises(Mismatch):
        run(sabotaged(what, change), exclude_static=exclude)


@pytest.mark.parametrize("exclude", [True, False])
def test_a_lost_static_token_is_seen(exclude):
    with pytest.raises(Mismatch):
        run(sabotaged("anticipation", lambda state, mask: mask & ~state._static), exclude_static=exclude)


@pytest.mark.parametrize("late", [-1, 1])
def test_a_token_more_or_less_is_seen(late):
    """If the other heads attend to a wrong set of tokens, the output differs from the reference's."""

    class Wrong(SyncKVState):
        def _visible(self) -> Tensor:
            self._since += late
            visible = super()._visible()
            self._since -= late
            return visible

    with pytest.raises(Mismatch, match="output at step"):
        run(Wrong)


def test_equal_tokens_may_be_chosen_by_the_rule_only():
    """Of two tokens with equal keys, the lower index must be chosen. If keys differ by less than the bound, either may
    be."""

    class Highest(SyncKVState):
        def _anticipate(self, query: Tensor) -> None:
            super()._anticipate(query)
            self._chosen = self._chosen.clone()
            self._chosen[..., 0], self._chosen[..., 1] = False, True

    def both(near: float) -> Lockstep:
        config = SyncKVConfig(1, 0.0, 1, 1, max_tokens=5)
        found = Lockstep(
            Highest(config, CLUSTERS, **SIZES, dtype=torch.float32, device="cpu"),
            SyncKVState(config, CLUSTERS, **SIZES, dtype=torch.float64, device="cpu"), Adapter(),
        )
        query, key, value = tokens(1, 3)
        key[:, :, 1] = key[:, :, 0] * (1 - near)
        query[:, :, 2] = key[:, 1:, 0]
        key[:, :, 2] = -key[:, :, 0]
        found.prefill(query, key, value)
        newest = [tensor[:, :, 2] for tensor in (query, key, value)]
        found.step(*newest)
        found.step(*newest)
        return found

    with pytest.raises(Mismatch):
        both(0.0)
    assert both(2.0**-23).summary.adjudicated > 0
    with pytest.raises(Mismatch):
        both(0.01)


def test_ranked_takes_the_lowest_of_equals():
    score = torch.tensor([[[1.0, 2.0, 2.0, 0.0]]])
    there = torch.tensor([[[True, True, True, False]]])
    assert best_candidates(score, there, 1).tolist() == [[[1]]]
    assert best_candidates(score, there, 4).tolist() == [[[0, 1, 2, -1]]]
