"""Every baseline's state against plain lists of tokens, over any sequence of calls: sums must move with their tokens.

Also the states of other packages whose checkers have a `Model`. The lists choose independently, in float64 and with
different code from the reference's. Lockstep judges the state under test first. If it finds a legal tie, the lists
adopt the choice.
"""

from __future__ import annotations

import copy

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from kvtwin.conformance import discovery
from kvtwin.conformance.cases import draws
from kvtwin.conformance.judge import checkers, lockstep
from kvtwin.conformance.judge.block_model import Head, vectors
from kvtwin.conformance.judge.compare import assert_within

BASELINES = [
    pair for pair in discovery.methods()
    if (pair.is_baseline and pair.takes_blocks) or (pair.declared and checkers.ask(pair.name, "Model", None))
]
pytestmark = [pytest.mark.kind("equivalence"), pytest.mark.parametrize("pair", BASELINES, ids=str)]

BATCH, QUERY_HEADS, HEADS, HEAD_DIM = 2, 2, 1, 16


class TokenLists(RuleBasedStateMachine):
    """A state under test, a float64 state in lockstep with it, and lists of tokens."""

    pair: discovery.Pair
    tested: object
    device: torch.device

    @initialize(data=st.data(), seed=st.integers(0, 2**32 - 1))
    def start(self, data: st.DataObject, seed: int) -> None:
        options = data.draw(checkers.ask(self.pair.name, "configs", None)(5, 4))
        options["softcap"] = data.draw(st.sampled_from((None, 1.5)))
        self.generator = torch.Generator().manual_seed(seed)
        self.both = lockstep.pair(
            self.pair.name, self.tested, config=options, batch=BATCH, query_heads=QUERY_HEADS, key_value_heads=HEADS,
            head_dim=HEAD_DIM, dtype=torch.float32, device=self.device,
            sink_logits=data.draw(st.sampled_from((None, torch.tensor([-1.0, 2.0], device=self.device)))),
        )
        self.forget()

    def forget(self) -> None:
        state = self.both.reference
        model = checkers.ask(self.pair.name, "Model", Head)
        sinks = None if state.sink_logits is None else state.sink_logits.tolist()
        self.lists = [model(state.config, state.scale, sinks) for _ in range(BATCH)]

    def tokens(self, count: int) -> dict[str, torch.Tensor]:
        """Values with many norms, which affect VATP."""
        query, key, value = (
            torch.randn(BATCH, heads, count, HEAD_DIM, generator=self.generator)
            for heads in (QUERY_HEADS, HEADS, HEADS)
        )
        value *= torch.exp2(torch.randint(-4, 4, (BATCH, HEADS, count, 1), generator=self.generator).float())
        return {name: x.to(self.device) for name, x in (("query", query), ("key", key), ("value", value))}

    def follow(self, tokens: dict[str, torch.Tensor], real: torch.Tensor) -> None:
        """Feed the lists the block in chunks, as the block cache does. The lists choose themselves what they keep,
        except in the last chunk if lockstep found a legal tie."""
        size, count = self.both.reference.config.block_size, real.shape[1]
        held = self.both.tested.positions
        tied = self.both.summary.adjudicated
        for b, row in enumerate(self.lists):
            for start in range(0, count, size):
                piece = slice(start, start + size)
                query = tokens["query"][b, :, piece].transpose(0, 1)                      # [Q, G, D]
                keep = {*held[b, 0].tolist()} if tied and start + size >= count else None
                row.take(
                    vectors(query), vectors(tokens["key"][b, 0, piece]), vectors(tokens["value"][b, 0, piece]),
                    real[b, piece].tolist(), keep,
                )
        self.both.summary.adjudicated = 0

    @rule(count=st.integers(1, 7), padding=st.integers(0, 3))
    def append_block(self, count: int, padding: int) -> None:
        tokens, real = self.tokens(count), torch.ones(BATCH, count, dtype=torch.bool, device=self.device)
        real[1, :min(padding, count - 1)] = False
        give = self.both.prefill if self.both.tested.tokens_seen == 0 else self.both.append_block
        give(**tokens, occupied=real)
        self.follow(tokens, real)

    @rule()
    def step(self) -> None:
        tokens = self.tokens(1)
        self.both.step(**{name: tensor[:, :, 0] for name, tensor in tokens.items()})
        self.follow(tokens, torch.ones(BATCH, 1, dtype=torch.bool, device=self.device))

    @rule()
    def reset(self) -> None:
        self.both.reset()
        self.forget()

    @rule(index=st.lists(st.integers(0, BATCH - 1), min_size=BATCH, max_size=BATCH))
    def reorder(self, index: list[int]) -> None:
        self.both.reorder(torch.tensor(index, device=self.device))
        self.lists = [copy.deepcopy(self.lists[source]) for source in index]

    @invariant()
    def the_slots_hold_the_tokens(self) -> None:
        if not hasattr(self, "both"):
            return
        state, adapter = self.both.tested, self.both.adapter
        slots = state.positions.shape[-1]
        assert state.tokens_seen == self.lists[0].seen
        for b, row in enumerate(self.lists):
            assert state.positions[b, 0].tolist() == row.positions(slots)
            for slot, token in enumerate(row.slots):
                if token is not None:
                    assert state.key[b, 0, slot].tolist() == token.key
                    assert state.value[b, 0, slot].tolist() == token.value
            expected = torch.tensor([row.scores(slots)], dtype=torch.float64, device=self.device)
            carried = torch.zeros_like(expected) if adapter.previous_error is None else adapter.previous_error[b]
            assert_within(state.score[b], expected, carried, what=f"score of row {b}")


@pytest.mark.slow_on_cpu
@pytest.mark.parametrize("side", ("reference", "optimized"))
def test_a_state_is_a_list_of_tokens(pair, side, twins, device):
    module = checkers.module(getattr(twins, side), pair)
    where = torch.device("cpu") if side == "reference" else device
    machine = type("Machine", (TokenLists,), {"pair": pair, "tested": module, "device": where})
    examples = settings().max_examples
    draws.run_machine(machine, settings=settings(
        max_examples=max(6, examples) if side == "reference" else max(3, examples // 3),
        stateful_step_count=12 if side == "reference" else 6,
    ))
