"""LongFlow's state against plain lists of tokens: the token in each slot, over any sequence of calls."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
)

from kvtwin.conformance.cases import draws
from kvtwin.reference.longflow import LongFlowConfig

pytestmark = pytest.mark.kind("equivalence")

BATCH, QUERY_HEADS, HEADS, HEAD_DIM = 2, 4, 2, 16


@dataclass
class Token:
    """One token of one row: key and value are [Hkv, D]."""

    position: int
    key: torch.Tensor
    value: torch.Tensor


class TokenList(RuleBasedStateMachine):
    """The model: for each row (and KV head, with per_head), a list of slots that hold tokens or None."""

    side: object
    device: torch.device

    @initialize(
        budget=st.integers(1, 6), per_head=st.booleans(), protect_newest=st.booleans(), sinks=st.integers(0, 2),
        seed=st.integers(0, 2**32 - 1),
    )
    def start(self, budget: int, per_head: bool, protect_newest: bool, sinks: int, seed: int) -> None:
        sinks = max(0, min(sinks, budget - 1 - (protect_newest and budget > 1)))
        self.config = LongFlowConfig(
            budget, per_head=per_head, protect_newest=protect_newest, sinks=sinks, window=3, kernel_size=3
        )
        self.generator = torch.Generator(self.device).manual_seed(seed)
        self.state = self.side.longflow.LongFlowState(
            self.config, batch=BATCH, query_heads=QUERY_HEADS, key_value_heads=HEADS, head_dim=HEAD_DIM,
            dtype=torch.float32, device=self.device,
        )
        self.forget()

    def forget(self) -> None:
        deciders = HEADS if self.config.per_head else 1
        self.slots: list[list[list[Token | None]]] = [
            [[None] * self.config.budget for _ in range(deciders)] for _ in range(BATCH)
        ]
        self.first: list[list[int]] = [[] for _ in range(BATCH)]
        self.seen = 0

    def draw(self, *time: int) -> list[torch.Tensor]:
        return [
            torch.randn(BATCH, heads, *time, HEAD_DIM, generator=self.generator, device=self.device)
            for heads in (QUERY_HEADS, HEADS, HEADS)
        ]

    @precondition(lambda self: self.seen == 0)
    @rule(total=st.integers(1, 9), padding=st.integers(0, 4))
    def prefill(self, total: int, padding: int) -> None:
        query, key, value = self.draw(total)
        occupied = torch.ones(BATCH, total, dtype=torch.bool, device=self.device)
        occupied[1, :min(padding, total - 1)] = False
        self.state.prefill(query, key, value, occupied)
        self.seen = total
        for b in range(BATCH):
            real = [t for t in range(total) if occupied[b, t]]
            self.first[b] = real[:self.config.sinks]
            positions = self.state.positions[b].reshape(-1, self.config.budget)
            room = self.config.budget - 1
            for decider, slots in enumerate(self.slots[b]):
                kept = [p for p in positions[decider].tolist() if p >= 0]
                assert len(kept) == min(room, len(real)), "a prompt must leave one slot free"
                assert kept == sorted(kept) and set(kept) <= set(real)
                newest = real[len(real) - min(self.config.window, max(0, room - self.config.sinks)):] if room else []
                assert set(newest) <= set(kept), f"the window's newest {newest} must be kept, got {kept}"
                for slot, p in enumerate(positions[decider].tolist()):
                    slots[slot] = None if p < 0 else Token(p, key[b, :, p], value[b, :, p])

    @rule()
    def step(self) -> None:
        query, key, value = self.draw()
        chosen = self.state.next_slot.clone().view(BATCH, -1)
        self.state.step(query, key, value)
        for b in range(BATCH):
            if len(self.first[b]) < self.config.sinks:
                self.first[b].append(self.seen)
            for decider, slots in enumerate(self.slots[b]):
                free = [slot for slot, token in enumerate(slots) if token is None]
                slot = int(chosen[b, decider])
                if free:
                    assert slot == free[0], f"expected the first free slot {free[0]}, got {slot}"
                slots[slot] = Token(self.seen, key[b], value[b])
        self.seen += 1

    @rule()
    def reset(self) -> None:
        self.state.reset()
        self.forget()

    @rule(index=st.lists(st.integers(0, BATCH - 1), min_size=BATCH, max_size=BATCH))
    def reorder(self, index: list[int]) -> None:
        self.state.reorder(torch.tensor(index, device=self.device))
        self.slots = [[list(slots) for slots in self.slots[source]] for source in index]
        self.first = [list(self.first[source]) for source in index]

    @invariant()
    def the_slots_hold_the_tokens(self) -> None:
        state = self.state
        assert state.tokens_seen == self.seen
        positions = state.positions.view(BATCH, -1, self.config.budget)
        occupied = state.occupied.view(BATCH, -1, self.config.budget)
        for b in range(BATCH):
            for decider, slots in enumerate(self.slots[b]):
                assert positions[b, decider].tolist() == [-1 if token is None else token.position for token in slots]
                assert occupied[b, decider].tolist() == [token is not None for token in slots]
                heads = [decider] if self.config.per_head else range(HEADS)
                for slot, token in enumerate(slots):
                    for head in heads if token else ():
                        assert torch.equal(state.key[b, head, slot], token.key[head])
                        assert torch.equal(state.value[b, head, slot], token.value[head])

    @invariant()
    def the_protected_are_there_and_safe(self) -> None:
        next_slot = self.state.next_slot.view(BATCH, -1)
        for b in range(BATCH):
            for decider, slots in enumerate(self.slots[b]):
                slot = int(next_slot[b, decider])
                assert 0 <= slot < self.config.budget
                held = {token.position for token in slots if token}
                assert set(self.first[b]) <= held, f"sinks {self.first[b]} must be kept, got {sorted(held)}"
                victim = slots[slot]
                if victim is None or self.config.budget == 1:
                    continue
                assert victim.position not in self.first[b], "a sink is about to be overwritten"
                just_written = self.config.protect_newest and victim.position == self.seen - 1
                assert not just_written, "the newest token is about to be overwritten"


@pytest.mark.parametrize("name", (
    "reference", pytest.param("optimized", marks=pytest.mark.property("state", slots="fixed"))
))
def test_longflow_state_is_a_list_of_tokens(name, twins, device):
    machine = type("Machine", (TokenList,), {"side": getattr(twins, name), "device": device})
    examples = settings().max_examples
    steps = settings(max_examples=max(5, examples // 2), stateful_step_count=8 if name == "optimized" else 20)
    draws.run_machine(machine, settings=steps)
