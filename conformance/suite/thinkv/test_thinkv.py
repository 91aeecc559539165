"""ThinKV's state: its segments and evictions against a model in plain integers, and lockstep with float64.

test_lockstep.py and test_laws.py have the tests that all methods share. Formats, thoughts, eviction and paging have
their own files.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from kvtwin.conformance.cases.state_trace import StateTrace
from kvtwin.conformance.cases.tiny import attributes
from kvtwin.conformance.judge import lockstep
from kvtwin.conformance.judge.bounds import UNIT
from kvtwin.conformance.judge.checkers.thinkv_state import Adapter
from kvtwin.conformance.judge.compare import assert_same
from kvtwin.reference import thinkv as reference
from kvtwin.reference.contract.thinkv.config import ThinKVConfig
from kvtwin.reference.contract.thinkv.types import Thought

pytestmark = [pytest.mark.kind("equivalence"), pytest.mark.main]

SIDES = pytest.mark.parametrize("side", ("reference", "optimized"))
few = settings(max_examples=max(2, settings().max_examples // 8))
SIZES = {"batch": 2, "query_heads": 2, "key_value_heads": 1, "head_dim": 16}


def new_state(module, device, dtype=torch.float32, **config):
    given_ = {"tau": 4, "group": 2, "block": 2, "retention": (2, 1), "max_tokens": 40, **config}
    return module.ThinKVState(ThinKVConfig(**given_), dtype=dtype, device=device, **SIZES)


def tokens(generator, device, *time):
    """query, key, value [B, heads, *time, D]."""
    heads = (SIZES["query_heads"], SIZES["key_value_heads"], SIZES["key_value_heads"])
    return [torch.randn(SIZES["batch"], h, *time, SIZES["head_dim"], generator=generator).to(device) for h in heads]


@dataclass
class Segment:
    thought: int
    size: int = 0
    level: int = 0


@dataclass
class Model:
    """The model of one row: the number of tokens in each segment."""

    config: ThinKVConfig
    segments: list[Segment] = field(default_factory=list)
    steps: int = 0
    over_budget: bool = False

    @property
    def live(self) -> int:
        return sum(segment.size for segment in self.segments)

    def prompt(self, count: int) -> None:
        while count > 0:
            self.segments.append(Segment(Thought.REASONING, min(count, self.config.tau)))
            count -= self.config.tau
            self.shrink()

    def step(self, thought: int) -> None:
        if self.steps % self.config.tau == 0:
            self.segments.append(Segment(thought))
        self.segments[-1].size += 1
        self.steps += 1
        if self.steps % self.config.tau == 0 and self.segments[-1].thought == Thought.TRANSITION:
            for segment in self.segments[:-1]:
                self.down(segment)
        self.shrink()

    def shrink(self) -> None:
        while self.live > self.config.budget:
            above = [one for one in self.segments[:-1] if one.size > self.config.retention[-1]]
            if not above:
                break
            self.down(min(above, key=lambda one: one.thought))
        self.over_budget = self.live > self.config.budget

    def down(self, segment: Segment) -> None:
        if segment.size == 0:                                         # it was evicted wholly
            return
        segment.level += 1
        segment.size = min(segment.size, self.config.retention[min(segment.level, len(self.config.retention)) - 1])


@pytest.mark.property("state")
@pytest.mark.claim("TK-9b")
@SIDES
@given(
    budget=st.integers(1, 16), prompt=st.integers(0, 11), padding=st.integers(0, 8),
    thoughts=st.lists(st.tuples(*[st.sampled_from(Thought)] * 2), min_size=2, max_size=2), last=st.integers(1, 4),
    retention=st.sampled_from(((2, 1), (3, 0), (0,))), seed=st.integers(0, 2**31 - 1),
)
@example(
    budget=9, prompt=11, padding=3, thoughts=[(Thought.EXECUTION, Thought.TRANSITION)] * 2, last=4, retention=(2, 1),
    seed=0,
)
@example(
    budget=9, prompt=11, padding=3, thoughts=[(Thought.EXECUTION, Thought.TRANSITION)] * 2, last=4, retention=(2, 0),
    seed=0,
)
@few
def test_thinkv_state_keeps_the_schedule(side, budget, prompt, padding, thoughts, last, retention, seed, twins, device):
    """Segments have tau tokens and the thought types that the caller sets. Transitions and the budget anneal them, with
    a minimum of 0 to nothing."""
    generator = torch.Generator().manual_seed(seed)
    state = new_state(getattr(twins, side).thinkv, device, budget=budget, retention=retention)
    rows = [Model(state.config), Model(state.config)]
    if prompt:
        occupied = torch.ones(2, prompt, dtype=torch.bool, device=device)
        occupied[1, :min(padding, prompt)] = False
        state.prefill(*tokens(generator, device, prompt), occupied)
        for row, count in zip(rows, occupied.sum(1).tolist(), strict=True):
            row.prompt(count)
        check(state, rows)
    for window, kinds in enumerate(thoughts):
        for step in range(last if window == len(thoughts) - 1 else state.config.tau):
            if step == 0:
                state.thought = torch.tensor([int(kind) for kind in kinds], device=device)
            state.step(*tokens(generator, device))
            for row, kind in zip(rows, kinds, strict=True):
                row.step(int(kind))
            check(state, rows)


def check(state, rows):
    buffered = state.positions[:, -state.config.group:] >= 0
    for b, row in enumerate(rows):
        held = state.segments[b][state.segments[b] >= 0]
        sizes = [int((held == number).sum()) for number in range(len(row.segments))]
        if row.segments:
            sizes[-1] += int(buffered[b].sum())
        assert sizes == [segment.size for segment in row.segments]
        assert state.levels[b, :len(row.segments)].tolist() == [segment.level for segment in row.segments]
        assert bool(state.over_budget[b]) == row.over_budget
        thoughts = state.cache.thoughts[b]
        for number, segment in enumerate(row.segments):
            assert set(thoughts[state.segments[b] == number].tolist()) <= {segment.thought}
        current = row.segments[-1].size if row.segments else 0
        floors = state.config.retention[-1] * (len(row.segments) - 1)
        assert row.live <= max(state.config.budget, floors + current)


@pytest.mark.property("state")
@pytest.mark.slow_on_cpu
@pytest.mark.parametrize("formats", ["nvfp4 nvfp4 ternary", "fp8 int4 int2"])
def test_thinkv_state_keeps_step_at_once_with_all_thoughts(formats, twins, device):
    """A prompt longer than the budget, windows of each type, and a step after a reorder, in lockstep with float64."""
    config = ThinKVConfig(
        8, tau=4, group=2, block=2, retention=(2, 1), max_tokens=40,
        formats=dict(zip("RET", formats.split(), strict=True)),
    )
    generator = torch.Generator().manual_seed(3)
    both = lockstep.Lockstep(
        twins.optimized.thinkv.ThinKVState(config, dtype=torch.float32, device=device, **SIZES),
        reference.ThinKVState(config, dtype=torch.float64, device=device, **SIZES), Adapter(),
    )
    for state in (both.tested, both.reference):
        state.thought = torch.zeros(2, dtype=torch.int64, device=device)  # a prompt is still reasoning
    both.prefill(*tokens(generator, device, 9))
    for kind in (Thought.TRANSITION, Thought.EXECUTION):
        for step in range(4):
            if step == 0:
                for state in (both.tested, both.reference):
                    state.thought = torch.full((2,), int(kind), device=device)
            both.step(*tokens(generator, device))
    both.reorder(torch.tensor([1, 1], device=device))
    both.step(*tokens(generator, device))
    assert_same(both.tested.levels[0], both.tested.levels[1], what="levels of two copies of a row")


@pytest.mark.property("state")
@SIDES
def test_thinkv_state_thoughts_come_from_the_sparsity(side, twins, device):
    """If a row attends to one token, all others are below the threshold. If it attends to all equally, none is."""
    state = new_state(
        getattr(twins, side).thinkv, device, budget=32, edges=(0.25, 0.5), sparsity_threshold=0.5,
        formats={"R": "fp8", "E": "fp8", "T": "fp8"},
    )
    query, key, value = (torch.zeros(2, h, 16, device=device) for h in (2, 1, 1))
    looked = key.clone()
    looked[..., 0] = 8
    query[0, :, 0] = 8                                                # row 0 attends to one token, row 1 to all
    for step in range(5):
        state.step(query, looked if step == 1 else key, value)
        if step < 4:
            assert state.sparsity.tolist() == [0, 0], "the sparsity must be that of the window's first step"
            assert state.thought.tolist() == [Thought.EXECUTION] * 2
    share, none = state.sparsity.double().tolist()
    assert 0.8 * (1 - 4 * UNIT) <= share <= 0.8 * (1 + 4 * UNIT), "a division and a mean of one number"
    assert none == 0
    assert state.thought.tolist() == [Thought.TRANSITION, Thought.EXECUTION]


def test_thinkv_state_takes_in_no_more_than_there_is_room_for(twins, device):
    """The host does not count replays of a graph. Beyond max_tokens the kernels store nothing and set `overflow`."""
    state = new_state(twins.optimized.thinkv, device, budget=4, max_tokens=8)
    generator = torch.Generator().manual_seed(13)
    for _ in range(8):
        state.step(*tokens(generator, device))
    assert not bool(state.cache.overflow.any())
    before = {**attributes(state), **{name: x.clone() for name, x in vars(state).items() if torch.is_tensor(x)}}
    for _ in range(5):
        state._counted = 0                                            # as after replays
        state.step(*tokens(generator, device))
    assert bool(state.cache.overflow.all())
    after = {**attributes(state), **{name: x for name, x in vars(state).items() if torch.is_tensor(x)}}
    for name in before.keys() - {"_position", "_flushing", "_change", "_looks"}:
        assert torch.equal(after[name], before[name]) if torch.is_tensor(after[name]) else after[name] == before[name]


@pytest.mark.property("ties", slots="fixed")
def test_thinkv_state_shrinks_in_the_order_of_positions(twins, device):
    """The oldest tokens with equal keys are kept, whatever their slots. Here one is in a reused slot."""
    state = new_state(twins.optimized.thinkv, device, budget=4)
    query, key, value = (torch.ones(2, heads, 16, device=device) for heads in (2, 1, 1))
    for _ in range(8):
        state.step(query, key, value)
    second = state.positions[0][state.segments[0] == 1].tolist()
    assert second != sorted(second), "the tokens must not be in order, or this test is empty"
    state.step(query, key, value)
    assert sorted(state.positions[0][state.segments[0] == 1].tolist()) == [4, 5]


@pytest.mark.property("decisions")
def test_thinkv_state_clusters_by_the_keys_of_all_heads(twins, device):
    """All keys of two KV heads are equal, so the keys of the third one decide, as in float64."""
    sizes = {**SIZES, "query_heads": 3, "key_value_heads": 3}
    config = ThinKVConfig(4, tau=8, group=4, block=2, retention=(3, 1), max_tokens=24)
    states = [
        module.ThinKVState(config, dtype=dtype, device=device, **sizes)
        for module, dtype in ((twins.optimized.thinkv, torch.float32), (reference, torch.float64))
    ]
    generator = torch.Generator().manual_seed(11)
    for _ in range(9):
        query, key, value = (torch.randn(2, 3, 16, generator=generator).to(device) for _ in range(3))
        key[:, :2] = 1
        for state in states:
            state.step(*(tensor.to(state.dtype) for tensor in (query, key, value)))
    assert states[0].occupied.sum(1).tolist() == [4, 4]
    assert_same(states[0].positions, states[1].positions, what="positions")
    assert states[0].positions[0].sort().values[-4:].tolist() != [0, 2, 5, 8], "kept if all keys were equal"


@pytest.mark.property("state")
@SIDES
def test_thinkv_state_evicts_whole_thoughts(side, twins, device):
    """With a minimum of 0, the second transition evicts every earlier segment and frees its blocks. The first
    transition goes at the third."""
    state = new_state(getattr(twins, side).thinkv, device, budget=40, retention=(2, 0))
    generator = torch.Generator().manual_seed(8)
    state.prefill(*tokens(generator, device, 6))
    state.thought = torch.full((2,), int(Thought.TRANSITION), device=device)
    for left, levels in (
        ([2, 2, 4, 0, 0], [1, 1, 0, 0, 0]), ([0, 0, 2, 4, 0], [2, 2, 1, 0, 0]), ([0, 0, 0, 2, 4], [2, 2, 2, 1, 0]),
    ):
        for _ in range(4):
            state.step(*tokens(generator, device))
        assert [int((state.segments[1] == number).sum()) for number in range(5)] == left
        assert state.levels[1, :5].tolist() == levels
        kinds = {entry.thought for entry in state.cache.block_table(1)}
        assert kinds == ({Thought.TRANSITION, Thought.REASONING} if left[0] else {Thought.TRANSITION})
    assert not bool(state.over_budget.any())


@SIDES
def test_thinkv_state_takes_less_memory_with_every_transition(side, twins, device):
    """Memory decreases when segments shrink, and codes with their scales take far less than 16 bits per element."""
    state = new_state(getattr(twins, side).thinkv, device, budget=64, tau=8, group=8, retention=(2, 1))
    generator = torch.Generator().manual_seed(5)
    state.prefill(*tokens(generator, device, 32))
    full = state.cache.bytes_allocated()
    bits = state.cache.bits_per_element()
    assert 4 < bits < 8
    state.thought = torch.full((2,), int(Thought.TRANSITION), device=device)
    for _ in range(8):
        state.step(*tokens(generator, device))
    assert state.occupied.sum(1).tolist() == [16, 16]                 # 2 of each of 4 segments, 8 of the transition
    assert state.cache.bytes_allocated() < full


@pytest.mark.property("state")
def test_thinkv_state_evicts_as_the_function_does_with_several_tiles_of_channels(twins, device):
    """Both read the keys in one order. With keys this large, another order of the sums would choose other tokens."""
    config = {
        "budget": 2, "tau": 4, "group": 2, "block": 2, "retention": (2, 1), "edges": (0.0, 0.3),
        "formats": {"R": "nvfp4", "E": "nvfp4", "T": "ternary"}, "sparsity_threshold": 0.01, "max_tokens": 36,
    }
    lockstep.run(StateTrace(
        batch=2, group=4, head_dim=200, device=str(device), content="extreme_1e4", poison="stale", scale=1.0, seed=2320,
        method="thinkv", config=tuple(config.items()), prompt=7, steps=2,
    ), twins.optimized.thinkv)
