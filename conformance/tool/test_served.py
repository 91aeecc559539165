"""judge/served.py, judge/repeats.py and judge/pieces.py, with sizes that the CPU can hold."""

from __future__ import annotations

import itertools
from collections import Counter
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from kvtwin.conformance import capabilities, discovery, stats
from kvtwin.conformance.cases.case import DecodeCase
from kvtwin.conformance.cases.format_cases import QuantizedCase
from kvtwin.conformance.cases.saved import load
from kvtwin.conformance.harness.impl import Twins
from kvtwin.conformance.judge import fields, fresh, many, pieces, repeats, served, subjects
from kvtwin.conformance.judge.compare import Mismatch
from kvtwin.conformance.judge.subjects import StateSubject
from kvtwin.conformance.refusals import NotProvided
from kvtwin.reference import longflow

SIZED = [one for one in subjects.every() if one.sized and one.batched and not isinstance(one, StateSubject)]
STATES = [one for one in subjects.every() if isinstance(one, StateSubject)]
DECODE = next(one for one in SIZED if str(one) == "longflow.decode_attention")


@pytest.fixture(autouse=True)
def _small(monkeypatch):
    monkeypatch.setattr("kvtwin.conformance.cases.draws.shares_kernels", lambda: False)  # with any profile
    monkeypatch.setattr(served, "SIZES", ((3, 17), (2, 33)))
    monkeypatch.setattr(served, "MODELS", ((4, 2, 16), (3, 1, 24), (2, 2, 16)))
    for name, count in (("ROWS", 3), ("PROMPT", 9), ("STEPS", 4)):
        monkeypatch.setattr(served, name, count)


class Kernel:
    """A module with LongFlow's `decode_attention`, the reference's but for `change(result, launch)`."""

    def __init__(self, change: Any) -> None:
        self.change, self.launches = change, 0

    def decode_attention(self, **given: Any) -> Any:
        self.launches += 1
        found = longflow.decode_attention(**given)
        return self.change(found, self.launches)


def case(**more: Any) -> DecodeCase:
    return DecodeCase(batch=3, key_value_heads=2, group=2, slots=33, seed=1, **more)


@pytest.mark.parametrize("subject", SIZED, ids=str)
def test_the_reference_is_right_in_every_property(subject):
    module = subject.module(Twins("kvtwin.reference").optimized)
    for prop in subject.properties:
        for one in itertools.islice(served.cases(subject, prop), 1):
            assert one.batch == 3 and (one.head_dim in (16, 24) or "head_dim" in one.fixed)
            with fields.apart() as found:
                subject.verify(module, one)
            assert not found.errors and found.counted and set(found.counted) <= set(subject.fields)


class Largest(TorchDispatchMode):
    """Records the bytes of the largest tensor that an operation returned."""

    bytes = 0

    def __torch_dispatch__(self, operation: Any, _: Any, given: Any = (), options: Any = None) -> Any:
        found = operation(*given, **(options or {}))
        made = [one for one in pytree.tree_leaves(found) if isinstance(one, torch.Tensor)]
        self.bytes = max([self.bytes, *(min(one.nbytes, one.untyped_storage().nbytes()) for one in made)])
        return found


@pytest.mark.parametrize("subject", [one for one in SIZED if "accuracy" in one.properties], ids=str)
def test_no_tensor_of_the_judge_is_much_larger_than_those_that_pieces_are_cut_by(subject, monkeypatch):
    """Not by more than four times: twice for a sum of two parts, twice for padding. A mask [B, H, N, S] of N kept
    tokens would be."""
    monkeypatch.setattr(pieces, "MOST_ELEMENTS", 1)
    monkeypatch.setattr(served, "SIZES", ((2, 2000),))
    monkeypatch.setattr(served, "MODELS", ((2, 2, 16),))
    module = subject.module(Twins("kvtwin.reference").optimized)
    for one in itertools.islice(served.cases(subject, "accuracy"), 1):
        found = subject.call(module, one)
        with Largest() as largest:
            for part, of_part in pieces.split(one, found):
                subject.judge(of_part, part)
        assert largest.bytes <= 4 * 8 * pieces.elements_of_row(one)


def test_a_scale_without_rows_belongs_to_each_piece(monkeypatch):
    """ThinKV's scale of a whole tensor."""
    monkeypatch.setattr(pieces, "MOST_ELEMENTS", 1)
    subject = next(one for one in SIZED if str(one) == "thinkv.dequantize")
    one = QuantizedCase(batch=2, key_value_heads=1, tokens=32, head_dim=16, fmt="nvfp4", tensor_scale=True)
    subject.verify(subject.module(Twins("kvtwin.reference").optimized), one)


@pytest.mark.parametrize("subject", STATES, ids=str)
def test_traces_of_every_state(subject):
    traces = list(served.traces(subject))
    assert [trace.dtype for trace in traces] == list(served.DTYPES)
    assert {(trace.batch, trace.steps, trace.prompt > 0) for trace in traces} == {(3, 4, True)}


def test_accuracy_and_decisions_share_all_models_in_all_dtypes():
    found = Counter(
        (one.query_heads, one.head_dim, one.dtype) for prop in served.CORE for one in served.cases(DECODE, prop)
    )
    count = len(served.MODELS)
    assert len(found) >= 2 * count - 1 and {dtype for *_, dtype in found} == set(served.DTYPES)


@pytest.mark.parametrize(("declared", "expected"), [
    ({"max_batch": 2}, {"batch": {2}}), ({"max_slots": 20}, {"slots": {17, 18, 20}}),
    ({"slots_multiple_of": 16}, {"slots": {16, 32}}), ({"dtypes": ("float16",)}, {"dtype": {torch.float16}}),
    ({"dtypes": ("float32",)}, {"dtype": {torch.float32}}),
    ({"head_dims": (24,)}, {"head_dim": {24}}), ({"groups": (5,), "kv_heads": (7,)}, {"group": {5}}),
    ({"protected": False}, {"protect": {"none"}}), ({"per_head": (False,)}, {"per_head": {False}}),
])
def test_cases_stay_inside_of_what_is_declared(declared, expected):
    with capabilities.use(capabilities.Capabilities(**declared)):
        found = [one for prop in served.CORE for one in served.cases(DECODE, prop)]
    assert {name: {getattr(one, name) for one in found} for name in expected} == expected


def test_what_cannot_be_drawn_is_not_provided():
    with pytest.raises(NotProvided, match="a case of these sizes"):
        served._drawn([st.nothing()], 0)


def test_other_seeds_have_other_cases(monkeypatch):
    from hypothesis import core

    def drawn(seed: int) -> list[str]:
        monkeypatch.setattr(core, "global_force_seed", seed)
        return [repr(one) for one in served.cases(DECODE, "free_slots")]

    assert drawn(1) == drawn(1) != drawn(2)


def test_pieces_are_judged_as_the_whole(monkeypatch):
    """With a wrong choice in the last row, which the message names."""
    one = case()
    module = Kernel(lambda found, _: found)
    monkeypatch.setattr(pieces, "MOST_ELEMENTS", pieces.elements_of_row(one))
    with stats.collect() as whole:
        DECODE.check(module, one, "slot", decides=True)
    assert whole.total == 3
    worst = longflow.decode_attention(**one.inputs).score.argmax(-1)
    bad = Kernel(lambda found, _: found._replace(slot=torch.cat([found.slot[:2], worst[2:]])))
    with pytest.raises(Mismatch, match=r"rows 2 to 2 of 3") as raised:
        DECODE.check(bad, one, "slot")
    assert raised.value.wrong == 1


def test_a_result_of_another_shape_is_judged_whole(monkeypatch):
    monkeypatch.setattr(pieces, "MOST_ELEMENTS", 1)
    module = Kernel(lambda found, _: found._replace(output=found.output[:2]))
    with pytest.raises(Mismatch, match="expected shape"):
        DECODE.check(module, case(), "output")


def test_a_large_case_is_saved_without_its_tensors(monkeypatch, tmp_path):
    monkeypatch.setattr("kvtwin.conformance.cases.case.MOST_SAVED", 100)
    one = case(content="dominant")
    one.save(tmp_path / "case.safetensors")
    assert (tmp_path / "case.safetensors").stat().st_size < 1000
    again = load(tmp_path / "case.safetensors")
    assert repr(again) == repr(one) and torch.equal(again.key, one.key)
    with pytest.raises(ValueError, match="made from its seed on cpu, got the device meta"):
        load(tmp_path / "case.safetensors", "meta")


@pytest.fixture(scope="module")
def process():
    started = fresh.Process("kvtwin.reference")
    yield started
    started.close()


#: A launch that differs, and what the message says of it.
ILL = {
    "the 7th": (lambda found, launch: found._replace(score=found.score + (launch == 7)), "score of launches one after"),
    "the 60th": (lambda found, launch: found._replace(score=-found.score) if launch == 60 else found, "beside another"),
    "the 75th": (lambda found, launch: found._replace(slot=found.slot ^ (launch == 75)), "on another stream"),
    "the 90th, its sign": (
        lambda found, launch: found._replace(output=found.output * (-1) ** (launch == 90)), "other contents of memory"
    ),
    "every one": (lambda found, launch: found._replace(score=found.score + launch), "40 of 40 launches"),
    "in another process": (lambda found, launch: found._replace(score=found.score + 1), "in a fresh process"),
}


@pytest.mark.parametrize("ill", ILL)
def test_a_launch_with_other_bits_is_found(ill, process):
    change, message = ILL[ill]
    with pytest.raises(Mismatch, match=message):
        repeats.assert_repeats(DECODE, Kernel(change), case(), process)


def test_a_hundred_launches_are_counted(process):
    with stats.collect() as counted:
        repeats.assert_repeats(DECODE, Kernel(lambda found, _: found), case(), process)
    on_a_cpu = repeats.IDLE + repeats.LOADED + repeats.APART + repeats.ELSEWHERE + 1
    assert counted.launches == on_a_cpu and on_a_cpu + repeats.REPLAYED > 100 and counted.cases == 1


@pytest.mark.parametrize(("short", "asked"), [(1, 2), (2, 2)], ids=["once", "twice"])
def test_a_fresh_process_without_memory_is_asked_again(short, asked, process):
    asks: list[Any] = []

    def answer() -> dict[str, Any]:
        said = process.answer()
        return {"error": "OutOfMemoryError: CUDA out of memory"} if len(asks) <= short else said

    beside = SimpleNamespace(ask=lambda *call: (asks.append(call), process.ask(*call)), answer=answer)
    with nullcontext() if short < asked else pytest.raises(Mismatch, match="fresh process: OutOfMemoryError"):
        repeats.assert_repeats(DECODE, Kernel(lambda found, _: found), case(), beside)
    assert asks == asks[:1] * asked


def test_a_state_that_differs_is_found():
    subject = next(one for one in STATES if one.method == "streaming_llm")
    module, pair = subject.module(Twins("kvtwin.reference").optimized), discovery.methods()
    found = next(one for one in pair if one.name == "streaming_llm")
    trace = next(served.traces(subject))
    made: list[Any] = []

    class State(module.StreamingLLMState):
        def step(self, *given: Any, **named: Any) -> torch.Tensor:
            return super().step(*given, **named) + (len(made) == 3)

    def new(kind: Any) -> Any:
        made.append(kind(found.config(**trace.options), **trace.sizes))
        return made[-1]

    repeats.assert_state_repeats(subject, module, trace, lambda: new(module.StreamingLLMState))
    made.clear()
    with pytest.raises(Mismatch, match="with other memory"):
        repeats.assert_state_repeats(subject, module, trace, lambda: new(State))


@pytest.mark.parametrize("subject", STATES, ids=str)
def test_long_traces_fit_every_state(subject, monkeypatch):
    """A state of the reference takes the config, and two of its steps."""
    trace = served.long_trace(subject)
    assert trace.steps == served.LONG and trace.batch == 1
    assert trace.options.get("max_tokens", trace.prompt + trace.steps + 1) > trace.prompt + trace.steps
    found = next(one for one in discovery.methods() if one.name == subject.method)
    assert found.config(**trace.options)


@pytest.mark.parametrize("quick", [False, True], ids=["all", "quick"])
@pytest.mark.parametrize("subject", [one for one in SIZED if one.choices], ids=str)
def test_many_rows_are_judged_in_every_dtype(subject, quick, monkeypatch):
    """With the profile quick in one."""
    monkeypatch.setattr(many.draws, "is_quick", lambda: quick)
    found: list[Any] = []

    @settings(max_examples=1, database=None)
    @given(data=st.data())
    def draw(data: Any) -> None:
        found[:] = many.cases(subject, data)

    draw()
    assert {one.batch for one in found} == {many.ROWS} and len({one.seed for one in found}) == len(found)
    dtypes = subject.dtypes[:1] if quick else subject.dtypes
    assert {stats.dtype_of(one) for one in found} in (set(dtypes), {""})
    assert len(found) == (1 if quick else many.CASES * len(dtypes)) > 0


def test_what_is_wrong_once_in_a_hundred_times_is_found_by_many():
    """With a probability of 95 % and more, by the counts that judge/many.py states."""
    assert 0.99 ** (many.ROWS * many.CASES * 3) < 0.05
    assert 0.99**many.LAUNCHES < 0.05 and 0.999**repeats.OFTEN < 0.05


def test_thousands_of_launches(monkeypatch):
    monkeypatch.setattr(repeats, "OFTEN", 60)
    with pytest.raises(Mismatch, match="1 of 60 launches have other bits"):
        repeats.assert_repeats_often(DECODE, Kernel(lambda found, launch: found._replace(
            score=found.score + (launch == 50))), case())
