"""Laws that hold for the state of every method. Methods are discovered; none is named here.

Laws that compare bits run a state twice, with a change that must have no effect. Laws that hold only within a bound
(permuted slots, other batch sizes) need the bounds of a method and are in test_<method>.py.
"""

from __future__ import annotations

import copy
import functools
import inspect
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from hypothesis import Phase, example, given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from kvtwin.conformance import capabilities, discovery, stats
from kvtwin.conformance.cases import supported
from kvtwin.conformance.cases.draws import is_quick
from kvtwin.conformance.cases.tiny import attributes
from kvtwin.conformance.judge import checkers
from kvtwin.conformance.refusals import NotProvided


@dataclass(frozen=True)
class LawPair(discovery.Pair):
    """A method with options for which its checker requires the laws to hold."""

    options: tuple[tuple[str, Any], ...] = ()

    @property
    def label(self) -> str:
        return "-".join((self.name, *(f"{name}={value}" for name, value in self.options)))


LAW_PAIRS = [
    LawPair(**vars(pair), options=tuple(options.items()))
    for pair in discovery.with_state() for options in ({}, *checkers.ask(pair.name, "LAWS", ()))
]
#: Further options choose other branches of the same kernels, which lockstep draws as well.
PAIRS = [
    pytest.param(pair, id=pair.label, marks=[pytest.mark.slow_on_cpu] if pair.options else []) for pair in LAW_PAIRS
]
pytestmark = [pytest.mark.kind("laws"), pytest.mark.parametrize("pair", PAIRS), pytest.mark.main]

# (query heads, key/value heads, head_dim, dtype). Only a few, because a GPU compiles kernels for each.
SHAPES = (
    (4, 2, 16, torch.float32),
    (3, 1, 24, torch.bfloat16),
    (10, 2, 32, torch.float16),
)

#: The modules of our states, and of those of other packages' methods, which can be copied.
OURS = (
    "kvtwin.reference.", "kvtwin.optimized.",
    *(name for pair in LAW_PAIRS if pair.declared for name in (pair.reference_name, pair.optimized_name)),
)


@dataclass(frozen=True)
class Scenario:
    """An optional prompt, which may have left padding, and some decode steps, drawn from a seed."""

    batch: int
    query_heads: int
    key_value_heads: int
    head_dim: int
    dtype: torch.dtype
    budget: int
    prompt: int
    padding: int
    steps: int
    seed: int

    def state(self, side: object, pair: LawPair, device: torch.device) -> object:
        """A fresh state of the method on one side, with options that are declared."""
        options = {**checkers.small(pair.name, self.budget), **dict(pair.options)}
        options |= {name: values[0] for name, values in supported.undeclared(options, pair.config).items()}
        return getattr(checkers.module(side, pair), pair.state.__name__)(
            checkers.small_config(pair, self.budget, options), batch=self.batch,
            query_heads=self.query_heads, key_value_heads=self.key_value_heads, head_dim=self.head_dim,
            dtype=self.dtype, device=device,
        )

    def inputs(self, device: torch.device) -> tuple[tuple[Tensor, ...] | None, list[tuple[Tensor, ...]]]:
        """(query, key, value, occupied) of the prompt or None, and (query, key, value) of each step."""
        generator = torch.Generator(device).manual_seed(self.seed)

        def token(*time: int) -> tuple[Tensor, ...]:
            return tuple(
                torch.randn(
                    self.batch, heads, *time, self.head_dim, generator=generator, device=device
                ).to(self.dtype)
                for heads in (self.query_heads, self.key_value_heads, self.key_value_heads)
            )

        prompt = None
        if self.prompt:
            occupied = torch.ones(self.batch, self.prompt, dtype=torch.bool, device=device)
            occupied[-1, :self.padding] = False
            prompt = (*token(self.prompt), occupied)
        return prompt, [token() for _ in range(self.steps)]


def shapes() -> list[tuple[int, int, int, torch.dtype]]:
    """Those of SHAPES that the implementation under test declares, or others that it does."""
    dtypes = supported.dtypes(shape[-1] for shape in SHAPES)
    declared = [
        (query_heads, heads, head_dim, dtype) for query_heads, heads, head_dim, dtype in SHAPES
        if dtype in dtypes and supported.size("head_dims", head_dim) and supported.size("kv_heads", heads)
        and supported.size("groups", query_heads // heads)
    ]
    heads, group, head_dim = (
        supported.sizes(name, usual)[0] for name, usual in (("kv_heads", (2,)), ("groups", (2,)), ("head_dims", (16,)))
    )
    return declared or [(heads * group, heads, head_dim, dtype) for dtype in dtypes]


@st.composite
def scenarios(draw: st.DrawFn, max_budget: int = 6) -> Scenario:
    query_heads, key_value_heads, head_dim, dtype = draw(st.sampled_from(shapes()))
    first, last, unit = supported.slots(1, 9)
    prompt = unit * draw(st.integers(0, max(first, last)))
    masked = capabilities.current().masks
    return Scenario(
        batch=draw(st.integers(supported.rows(2), supported.rows(3))), query_heads=query_heads,
        key_value_heads=key_value_heads, head_dim=head_dim, dtype=dtype, budget=draw(st.integers(2, max_budget)),
        prompt=prompt, padding=draw(st.integers(0, max(0, prompt - 1))) if masked else 0,
        steps=draw(st.integers(1, 5)), seed=draw(st.integers(0, 2**32 - 1)),
    )


# Every profile includes this scenario: a prompt longer than the budget, padding, and reused slots.
FULL = Scenario(
    batch=2, query_heads=4, key_value_heads=2, head_dim=16, dtype=torch.float32, budget=4, prompt=8, padding=3,
    steps=2, seed=20,
)


def few(law):
    """Run a law on FULL and a few drawn scenarios. Few, because there are many methods, sides and laws, and a token
    takes a tenth of a second. Options other than the defaults run only FULL; lockstep draws these options as well. So
    does every state with the profile quick, which would draw the simplest scenario alone."""
    drawn = [name for name in ("row", "shift") if name in inspect.signature(law).parameters]
    limited = settings(max_examples=max(1, settings().max_examples // 7))
    if is_quick():
        limited = settings(limited, phases=[Phase.explicit])

    @functools.wraps(law)
    def sparing(scenario, pair, **others):
        if scenario == FULL or not pair.options:
            dtypes = supported.dtypes(shape[-1] for shape in SHAPES)
            dtype = scenario.dtype if scenario.dtype in dtypes else dtypes[0]
            scenario = replace(scenario, batch=supported.rows(scenario.batch), dtype=dtype)
            law(scenario=scenario, pair=pair, **others)
            stats.judged_case(scenario, f"{pair.label} {law.__name__}")

    return example(scenario=FULL, **dict.fromkeys(drawn, 1))(limited(sparing))


def needs_rows() -> None:
    if supported.rows(2) < 2:
        raise NotProvided("more than one row")


def snapshot(state: object) -> dict[str, Tensor]:
    """The public tensors of a state, which later steps and users can read. Unoccupied slots are left out."""
    return {name: value for name, value in attributes(state).items() if isinstance(value, Tensor)}


def play(state: object, inputs: tuple, *, before_step=lambda state: None) -> list[dict[str, Tensor]]:
    """Run the scenario. Returns the snapshots, with outputs, after the prompt and after each step."""
    prompt, steps = inputs
    frames = []
    if prompt is not None:
        query, key, value, occupied = prompt
        output = state.prefill(query, key, value, occupied, **checkers.extras(state, query, key, value))
        frames.append({"output": output, **snapshot(state)})
    for token in steps:
        before_step(state)
        frames.append({"output": state.step(*token, **checkers.extras(state, *token)), **snapshot(state)})
    return frames


Frames = list[dict[str, Tensor]]


def played(scenario: Scenario, side: object, pair: LawPair, device: torch.device) -> tuple[object, Frames]:
    """A new state after the unchanged scenario, and its frames. Those of FULL are kept for all laws, which must not
    change them."""
    key = (id(side), pair.label, device)
    if scenario == FULL and key in KEPT:
        return KEPT[key]
    state = scenario.state(side, pair, device)
    found = state, play(state, scenario.inputs(device))
    if scenario == FULL:
        KEPT[key] = found
    return found


def plain(scenario: Scenario, side: object, pair: LawPair, device: torch.device) -> list[dict[str, Tensor]]:
    """The frames of the unchanged scenario, with which laws compare."""
    return played(scenario, side, pair, device)[1]


KEPT: dict[tuple[int, str, torch.device], tuple[object, Frames]] = {}


def assert_same_bits(actual: list[dict[str, Tensor]], expected: list[dict[str, Tensor]], why: str) -> None:
    assert len(actual) == len(expected)
    for step, (a, e) in enumerate(zip(actual, expected, strict=True)):
        if a["occupied"].shape != e["occupied"].shape:
            a, e = without_free_end(a), without_free_end(e)
        for name in e:
            same = torch.equal(bits(a[name]), bits(e[name]))
            assert same, f"{why}: {name} differs at frame {step}:\n{a[name]}\nexpected the same bits as\n{e[name]}"


#: The dimension of the slots, counted from the last.
SLOT_DIMENSION = {"occupied": 1, "positions": 1, "score": 1, "key": 2, "value": 2}


def without_free_end(frame: dict[str, Tensor]) -> dict[str, Tensor]:
    """Leave out the slots at the end that are free in all rows: a state may have as many slots as its fullest row has
    tokens, and a law may compare rows that were in different batches."""
    slots = frame["occupied"].shape[-1]
    used = frame["occupied"].flatten(0, -2).any(0).nonzero().flatten().tolist()
    end = used[-1] + 1 if used else 0

    def cut(name: str, tensor: Tensor) -> Tensor:
        dimension = tensor.dim() - SLOT_DIMENSION.get(name, tensor.dim())
        return tensor.narrow(dimension, 0, end) if dimension > 0 and tensor.shape[dimension] == slots else tensor

    return {name: cut(name, tensor) for name, tensor in frame.items()}


def bits(tensor: Tensor) -> Tensor:
    """A view in which NaN equals itself and -0 differs from 0."""
    kinds = {torch.float64: torch.int64, torch.float32: torch.int32}
    if not tensor.is_floating_point():
        return tensor
    return tensor.contiguous().view(kinds.get(tensor.dtype, torch.int16))


def rows(frames: list[dict[str, Tensor]], index: Tensor) -> list[dict[str, Tensor]]:
    return [{name: tensor[index] for name, tensor in frame.items()} for frame in frames]


def map_inputs(inputs: tuple, change) -> tuple:
    prompt, steps = inputs
    return (
        None if prompt is None else tuple(map(change, prompt)), [tuple(map(change, token)) for token in steps]
    )


@pytest.fixture(scope="session", params=("reference", "optimized"))
def side(request, twins):
    """Laws must hold for both twins."""
    return getattr(twins, request.param)


@pytest.mark.property("state")
@given(scenario=scenarios())
@few
def test_kept_and_evicted_make_the_input(scenario, side, pair, device):
    """Slots hold distinct tokens of the input. An evicted token never returns. The budget is never exceeded."""
    prompt, _ = scenario.inputs(device)
    state, frames = played(scenario, side, pair, device)
    most = checkers.ask(pair.name, "max_kept", lambda state, tokens: min(scenario.budget, tokens))
    tokens = scenario.prompt
    real = torch.full((scenario.batch,), tokens, device=device)
    if prompt is not None:
        real = prompt[3].sum(-1)
    alive = [set(range(tokens)) for _ in range(scenario.batch)]
    if prompt is not None:
        alive = [set(row.nonzero().flatten().tolist()) for row in prompt[3]]
    for number, frame in enumerate(frames):
        step = number - (prompt is not None)
        seen = tokens + step + 1
        positions, occupied = frame["positions"], frame["occupied"]
        assert torch.equal(positions >= 0, occupied), "a slot must be occupied if and only if it has a position"
        assert torch.equal(torch.where(occupied, positions, -1), positions), "the position of a free slot must be -1"
        for b in range(scenario.batch):
            arrived = alive[b] | ({seen - 1} if step >= 0 else set())
            held: set[int] = set()
            for head in positions[b].reshape(-1, positions.shape[-1]):
                kept = head[head >= 0].tolist()
                assert len(kept) == len(set(kept)), f"frame {number}, row {b}: a token is in two slots: {kept}"
                assert len(kept) <= most(state, int(real[b]) + step + 1), f"over budget: {kept}"
                assert set(kept) <= arrived, f"frame {number}, row {b}: unexpected tokens {set(kept) - arrived}"
                held |= set(kept)
            alive[b] = held
    assert state.tokens_seen == tokens + scenario.steps


@pytest.mark.property("repeatability")
@given(scenario=scenarios())
@few
def test_the_same_input_gives_the_same_bits(scenario, side, pair, device):
    again = play(scenario.state(side, pair, device), scenario.inputs(device))
    assert_same_bits(again, plain(scenario, side, pair, device), "launched again")
    stats.launches(len(again))
    if not pair.options:
        stats.case()  # so that a verdict on a state alone has enough cases


@pytest.mark.property("state")
@given(scenario=scenarios())
@few
def test_a_reset_state_is_a_fresh_one(scenario, side, pair, device):
    inputs = scenario.inputs(device)
    other = replace(scenario, seed=scenario.seed ^ 1, padding=0, steps=1).inputs(device)
    state = scenario.state(side, pair, device)
    play(state, other)
    state.reset()
    assert_same_bits(play(state, inputs), plain(scenario, side, pair, device), "after reset()")


@pytest.mark.property("independence")
@given(scenario=scenarios(), row=st.integers(0, 1))
@few
def test_rows_are_independent(scenario, row, side, pair, device):
    """Replacing all other rows of a batch by NaN does not change a bit of a row."""
    needs_rows()
    inputs = scenario.inputs(device)
    alone = torch.arange(scenario.batch, device=device) == row

    def replace_others(tensor: Tensor) -> Tensor:
        others = ~alone.view(-1, *[1] * (tensor.dim() - 1))
        return tensor if tensor.dtype == torch.bool else tensor.masked_fill(others, torch.nan)

    index = torch.tensor([row], device=device)
    mixed = play(scenario.state(side, pair, device), map_inputs(inputs, replace_others))
    assert_same_bits(rows(mixed, index), rows(plain(scenario, side, pair, device), index), "other rows replaced")


@pytest.mark.property("independence")
@given(scenario=scenarios(), shift=st.integers(1, 2))
@few
def test_permuted_rows_give_permuted_results(scenario, shift, side, pair, device):
    needs_rows()
    index = torch.arange(scenario.batch, device=device).roll(shift)
    inputs = scenario.inputs(device)
    permuted = play(scenario.state(side, pair, device), map_inputs(inputs, lambda tensor: tensor[index]))
    assert_same_bits(permuted, rows(plain(scenario, side, pair, device), index), "rows permuted")


def poison_slots(state: object) -> None:
    """Write NaN to the free slots of keys, and infinity to those of values."""
    slots = state.occupied if state.occupied.dim() == 3 else state.occupied[:, None]
    for tensor, value in ((state.key, torch.nan), (state.value, torch.inf)):
        tensor.copy_(torch.where(slots[..., None], tensor, value))


@pytest.mark.slow_on_cpu  # test_properties.py judges free slots of states, too
@pytest.mark.property("free_slots")
@given(scenario=scenarios(max_budget=12))
@few
def test_contents_of_unoccupied_slots_have_no_effect(scenario, side, pair, device):
    """Free slots are poisoned before each step, and the prompt's padding is NaN."""
    prompt, steps = scenario.inputs(device)
    poison = checkers.ask(pair.name, "poison", poison_slots)
    if prompt is not None:
        hidden = ~prompt[3][:, None, :, None]
        prompt = (*(tensor.masked_fill(hidden, torch.nan) for tensor in prompt[:3]), prompt[3])
    poisoned = play(scenario.state(side, pair, device), (prompt, steps), before_step=poison)
    assert_same_bits(poisoned, plain(scenario, side, pair, device), "unoccupied slots poisoned")


@pytest.mark.property("state")
@given(scenario=scenarios(), shift=st.integers(0, 2))
@few
def test_reordered_rows_go_on_as_their_sources(scenario, shift, side, pair, device):
    """As in beam search: after reorder(index), row b continues row index[b]. Rows may be repeated."""
    prompt, steps = scenario.inputs(device)
    index = (torch.arange(scenario.batch, device=device) * (shift != 2)).roll(shift)
    state = scenario.state(side, pair, device)
    play(state, (prompt, steps))
    if type(state).__module__.startswith(OURS):
        unmoved = copy.deepcopy(state)
    else:
        unmoved = scenario.state(side, pair, device)
        play(unmoved, (prompt, steps))
    state.reorder(index)
    later = replace(scenario, prompt=0, seed=scenario.seed ^ 2).inputs(device)
    actual = play(state, map_inputs(later, lambda tensor: tensor[index]))
    assert_same_bits(actual, rows(play(unmoved, later), index), "reordered")


@pytest.mark.property("free_slots")
def test_padding_of_a_prompt_gets_zeros(side, pair, device):
    """Padding has zero outputs, even after tokens that it could attend to. No token has zero outputs."""
    query_heads, key_value_heads, head_dim, dtype = SHAPES[0]
    scenario = Scenario(supported.rows(2), query_heads, key_value_heads, head_dim, dtype, 4, 5, 1, 0, seed=1)
    prompt, _ = scenario.inputs(device)
    prompt[3][-1, 3] = False
    (frame,) = play(scenario.state(side, pair, device), (prompt, []))
    assert torch.equal((frame["output"] == 0).all(-1).all(1), ~prompt[3])


class _Launches(TorchDispatchMode):
    """Counts the custom operations of this package, or of a method's, that run."""

    def __init__(self, *namespaces: str) -> None:
        super().__init__()
        self.namespaces = namespaces
        self.names: list[str] = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function.namespace in self.namespaces:
            self.names.append(function.name())
        return function(*args, **(kwargs or {}))


def bytes_of_slots(state: object) -> int:
    return sum(tensor.untyped_storage().nbytes() for tensor in (state.key, state.value))


def test_laws_are_tested_with_evictions(pair, twins, device):
    """The laws are not empty: the cache is smaller than its input, tokens were evicted, and our kernels ran."""
    query_heads, key_value_heads, head_dim, dtype = SHAPES[0]
    scenario = Scenario(2, query_heads, key_value_heads, head_dim, dtype, 4, 9, 0, 3, seed=1)
    state = scenario.state(twins.optimized, pair, device)
    with _Launches("kvtwin", pair.name) as launches:
        play(state, scenario.inputs(device))
    full = 2 * scenario.batch * key_value_heads * (scenario.prompt + scenario.steps) * head_dim * dtype.itemsize
    held = checkers.ask(pair.name, "bytes_of", bytes_of_slots)(state)
    assert held < full, f"the cache has {held} bytes, and its whole input {full}"
    if checkers.ask(pair.name, "EVICTS", True):
        assert int(state.occupied.sum(-1).max()) < state.tokens_seen
    assert scenario.budget < state.tokens_seen
    if type(state).__module__.startswith(("kvtwin.optimized", pair.optimized_name)):
        assert launches.names, "no operation of kvtwin or of the method ran"
