"""ThinKV's paged cache over any sequence of calls, against lists of tokens, and the tables of the twins.

Sequences start and end, have thoughts in any order, are flushed when necessary or earlier, lose any tokens of any past
segment, and are copied. The lists determine which tokens are in the cache, and the table where they are.
"""

from __future__ import annotations

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from kvtwin.conformance.cases import draws
from kvtwin.conformance.cases.draws import at_least
from kvtwin.conformance.cases.paged_cases import FORMATS, config_of
from kvtwin.conformance.judge.checkers.thinkv_paging import (
    assert_attention_right,
    assert_same_contents,
    assert_same_tables,
)
from kvtwin.conformance.judge.compare import assert_same
from kvtwin.conformance.judge.paged_model import Sequence
from kvtwin.reference.thinkv.paging import in_order

pytestmark = pytest.mark.first

BATCH, QUERY_HEADS, HEADS, HEAD_DIM = 2, 2, 1, 16
ROWS = st.lists(st.booleans(), min_size=BATCH, max_size=BATCH)
KINDS = st.lists(st.integers(0, 2), min_size=BATCH, max_size=BATCH)


class TokenLists(RuleBasedStateMachine):
    """The side under test, the reference in float32 (for its table) and in float64 (for the truth), and lists of
    tokens."""

    twins: object
    device: torch.device

    @initialize(formats=st.sampled_from(FORMATS), shape=st.sampled_from(((4, 2), (3, 4), (6, 3))),
                dtype=st.sampled_from((torch.float32, torch.bfloat16)), seed=st.integers(0, 2**32 - 1))
    def start(self, formats: str, shape: tuple[int, int], dtype: torch.dtype, seed: int) -> None:
        self.generator = torch.Generator().manual_seed(seed)
        group, block = shape
        self.config = config_of(formats, tokens=64, group=group, block=block, budget=8)
        sizes = {"batch": BATCH, "key_value_heads": HEADS, "head_dim": HEAD_DIM, "device": self.device}
        reference, optimized = self.twins.reference.thinkv, self.twins.optimized.thinkv
        self.tested = optimized.PagedCache(self.config, dtype=dtype, **sizes)
        self.table = reference.PagedCache(self.config, dtype=dtype, **sizes)
        self.truth = reference.PagedCache(self.config, dtype=torch.float64, **sizes)
        self.lists = [Sequence(self.config) for _ in range(BATCH)]
        self.next = [0] * BATCH
        self.segment, self.kinds = 0, [2] * BATCH

    def all(self, call: str, *arguments: torch.Tensor) -> None:
        for cache in (self.tested, self.table, self.truth):
            getattr(cache, call)(*(x.to(cache.dtype) if x.is_floating_point() else x for x in arguments))

    def tensor(self, numbers: list[int] | list[bool]) -> torch.Tensor:
        return torch.tensor(numbers, device=self.device)

    def flush_rows(self, rows: list[bool]) -> None:
        expected = [
            row.blocks_after(self.tested, b, self.kinds[b]) if rows[b] else None for b, row in enumerate(self.lists)
        ]
        self.all("flush", self.tensor(rows), self.tensor(self.kinds), self.tensor([self.segment] * BATCH))
        for b, row in enumerate(self.lists):
            if rows[b]:
                row.flush(self.kinds[b], self.segment)
                held = int((self.tested.block_thoughts[b] >= 0).sum())
                assert held == expected[b], "a block must be opened if and only if its type has no free slots"

    @rule(count=st.integers(1, 5), rows=ROWS)
    def tokens(self, count: int, rows: list[bool]) -> None:
        """Append tokens for some steps. Full buffers are flushed first. No row exceeds the config's peak."""
        for _ in range(count):
            full = [len(row.waiting) == self.config.group for row in self.lists]
            if any(full):
                self.flush_rows(full)
            here = [
                self.next[b] if comes and len(row.tokens) < self.config.peak and self.next[b] < 60 else -1
                for b, (comes, row) in enumerate(zip(rows, self.lists, strict=True))
            ]
            key, value = torch.randn(2, BATCH, HEADS, HEAD_DIM, generator=self.generator).to(self.tested.dtype)
            self.all("append", key.to(self.device), value.to(self.device), self.tensor(here))
            for b, position in enumerate(here):
                if position >= 0:
                    self.lists[b].append(position, key[b], value[b])
                    self.next[b] += 1

    @rule(rows=ROWS)
    def flush(self, rows: list[bool]) -> None:
        """Flush early, and possibly with an empty buffer."""
        self.flush_rows(rows)

    @rule(kinds=KINDS)
    def refresh(self, kinds: list[int]) -> None:
        """End a window: buffered tokens belong to it, and another thought begins."""
        self.flush_rows([True] * BATCH)
        self.segment = min(self.segment + 1, self.config.segments - 1)
        self.kinds = kinds

    @rule(data=st.data(), share=st.sampled_from((0.25, 0.6, 1.0)))
    def anneal(self, data: st.DataObject, share: float) -> None:
        """Evict any quantized tokens of every row. Slots without tokens may also be marked."""
        gone = []
        for row in self.lists:
            drawn = torch.rand(64, generator=self.generator) < share
            gone.append({token.position for token in row.quantized if drawn[token.position]})
            row.evict(gone[-1])
        held = self.table.positions.tolist()
        marked = torch.tensor(
            [[position in going for position in row] for going, row in zip(gone, held, strict=True)]
        ).to(self.device)
        free = data.draw(st.booleans()) and ~self.table.occupied
        self.all("evict", marked | free)

    @rule(rows=ROWS)
    def leave(self, rows: list[bool]) -> None:
        self.all("release", self.tensor(rows))
        for b, gone in enumerate(rows):
            if gone:
                self.lists[b], self.next[b] = Sequence(self.config), 0

    @rule(index=st.lists(st.integers(0, BATCH - 1), min_size=BATCH, max_size=BATCH))
    def reorder(self, index: list[int]) -> None:
        self.all("reorder", self.tensor(index))
        self.lists = [self.lists[source].copy() for source in index]
        self.next = [self.next[source] for source in index]

    @rule(scale=st.sampled_from((None, 1.0)))
    def attend(self, scale: float | None) -> None:
        """Attention equals that over the listed tokens, in any order of their slots (theorem 1)."""
        key, value, occupied = in_order(self.truth, torch.float64)
        for b, row in enumerate(self.lists):
            count = int(occupied[b].sum())
            assert count == len(row.tokens)
            if count:
                _, keys, values = row.in_order()
                assert_same(key[b, :, :count], keys.to(self.device), what=f"row {b}: the truth's keys")
                assert_same(value[b, :, :count], values.to(self.device), what=f"row {b}: the truth's values")
        query = torch.randn(BATCH, QUERY_HEADS, HEAD_DIM, generator=self.generator).to(self.device, self.tested.dtype)
        result = self.twins.optimized.thinkv.decode_attention(query, self.tested, scale=scale)
        assert_attention_right(result, self.truth, query, scale=scale)

    @rule(numbers=st.booleans())
    def look(self, numbers: bool) -> None:
        """The stored bits, the costs and the displayed table are equal."""
        assert_same_contents(self.tested, self.table, numbers=numbers)
        assert self.tested.bytes_allocated() == self.table.bytes_allocated()
        assert self.tested.bits_per_element() == self.table.bits_per_element()
        for b in range(BATCH):
            assert self.tested.block_table(b) == self.table.block_table(b)

    @invariant()
    def the_table_holds_the_tokens(self) -> None:
        if not hasattr(self, "lists"):
            return
        assert_same_tables(self.tested, self.table)
        for b, row in enumerate(self.lists):
            row.check(self.tested, b)


@pytest.mark.slow_on_cpu
@pytest.mark.property("state")
def test_a_paged_cache_is_a_list_of_tokens(twins, device):
    machine = type("Machine", (TokenLists,), {"twins": twins, "device": device})
    draws.run_machine(machine, settings=settings(
        max_examples=max(at_least(6), settings().max_examples * 3 // 10), stateful_step_count=16,
    ))


@pytest.mark.property("state")
@pytest.mark.parametrize("formats", FORMATS[1:2])
def test_a_long_run(formats, twins, device):
    """A trace up to the last position, with blocks of 3 and groups of 4, in which slots are reused many times."""
    machine = type("Machine", (TokenLists,), {"twins": twins, "device": device})()
    machine.start(formats, (4, 3), torch.float32, seed=7)
    generator = torch.Generator().manual_seed(8)
    for step in range(8):
        machine.tokens(4, [True, step % 4 > 0])
        machine.refresh(torch.randint(0, 3, (BATCH,), generator=generator).tolist())
        machine.anneal(_Always(), 0.6)
        machine.the_table_holds_the_tokens()
    assert machine.next[0] == 32
    assert bool(machine.tested.evicted.any())
    machine.look(False)
    machine.attend(None)


class _Always:
    def draw(self, _: object) -> bool:
        return True
