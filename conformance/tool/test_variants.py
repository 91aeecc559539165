"""The variants of every method: inside of what is declared, different traces, and wrong states that they find."""

from __future__ import annotations

import types

import pytest
import torch

from kvtwin.conformance import Capabilities, capabilities, discovery, stats
from kvtwin.conformance.cases import saved
from kvtwin.conformance.cases.state_trace import StateTrace
from kvtwin.conformance.judge import checkers, lockstep, subjects, variants
from kvtwin.conformance.judge.compare import Mismatch
from kvtwin.conformance.lab.implementations import longflow_states
from kvtwin.conformance.refusals import NotProvided
from kvtwin.reference import longflow

CPU = torch.device("cpu")
every_method = pytest.mark.parametrize("pair", discovery.methods(), ids=str)
SMALL = Capabilities(
    dtypes=("float16",), head_dims=(32,), groups=(4,), kv_heads=(2,), max_batch=1, masks=False, contiguous_only=True,
    per_head=(True,), page_sizes=(16,), slots_multiple_of=4, options={"interval": (1,)},
)


def pair(name: str) -> discovery.Pair:
    return next(one for one in discovery.methods() if one.name == name)


def named(name: str, method: str = "longflow") -> variants.Variant:
    return next(one for one in variants.variants_of(method) if one.name == name)


def longflow_of(state: type) -> types.SimpleNamespace:
    return types.SimpleNamespace(LongFlowState=state)


@every_method
def test_every_variant_has_a_trace_whose_config_is_valid(pair):
    made = variants.variants_of(pair.name)
    assert len({one.name for one in made}) == len(made) >= len(variants.GENERIC)
    for one in made:
        trace = variants.trace_of(pair, one, 0, CPU)
        assert pair.config is not None
        pair.config(**trace.options)
        assert "max_tokens" not in trace.options or trace.options["max_tokens"] > trace.prompt + trace.steps - 1


@every_method
def test_variants_stay_inside_of_what_is_declared(pair):
    provided = 0
    with capabilities.use(SMALL):
        for one in variants.variants_of(pair.name):
            try:
                trace = variants.trace_of(pair, one, 0, CPU)
            except NotProvided:
                continue
            provided += 1
            sizes = (trace.batch, trace.key_value_heads, trace.group, trace.head_dim, trace.dtype)
            assert sizes == (1, 2, 4, 32, torch.float16), one
            assert (trace.padding, trace.layout, trace.prompt % 4) == ("none", "contiguous", 0), one
            assert trace.pages in (0, 16), one
            assert trace.options.get("per_head", True) and trace.options.get("interval", 1) == 1, one
    assert provided >= 10


def test_a_variant_whose_own_option_is_not_declared_is_not_provided():
    with capabilities.use(Capabilities(options={"sinks": (0,)})), pytest.raises(NotProvided, match="sinks"):
        variants.trace_of(pair("longflow"), named("fewer-tokens-than-sinks"), 0, CPU)
    with capabilities.use(Capabilities(max_slots=16)), pytest.raises(NotProvided, match="max_slots"):
        variants.trace_of(pair("longflow"), named("prompt-of-33"), 0, CPU)


def test_a_state_without_pages_or_turns_does_not_provide_them():
    with pytest.raises(NotProvided, match="pages"):
        variants.check(pair("longflow"), named("per-head-in-pages"), longflow_of(longflow_states.LongFlow), CPU)
    turn = variants.variant("turn", turns=((1, 2),))
    with pytest.raises(NotProvided, match="append_block"):
        variants.check(pair("longflow"), turn, longflow_of(longflow_states.LongFlow), CPU)


@pytest.mark.parametrize("state", [
    longflow_states.CountsOnAfterReset, longflow_states.IgnoresReorder, longflow_states.ScalesTheQuery,
], ids=lambda state: state.__name__)
def test_the_variant_of_order_and_reset_finds_what_is_wrong(state):
    one = named("rows-in-another-order-and-reset")
    variants.check(pair("longflow"), one, longflow_of(longflow_states.LongFlow), CPU)
    with pytest.raises(Mismatch):
        variants.check(pair("longflow"), one, longflow_of(state), CPU)
    assert not one.long, "a quick run judges it, too"


def test_a_trace_that_decides_too_little_is_run_again_with_other_numbers(monkeypatch):
    seeds = []

    def run(trace, module):
        seeds.append(trace.seed)
        stats.decisions(10, 10 if len(seeds) == 3 else 0 if len(seeds) == 1 else 5)

    monkeypatch.setattr(lockstep, "run", run)
    with stats.collect():
        variants.check(pair("longflow"), named("no-prompt"), longflow, CPU)
    assert len(seeds) == len(set(seeds)) == 3


def test_a_trace_with_turns_and_pages_is_saved_and_replayed(tmp_path):
    keydiff = pair("keydiff")
    trace = variants.trace_of(keydiff, named("pages-and-turns", "keydiff"), 3, CPU)
    assert trace.turns and trace.pages and eval(repr(trace), {"torch": torch, "StateTrace": StateTrace}) == trace
    trace.save(tmp_path / "case.safetensors")
    loaded = saved.load(tmp_path / "case.safetensors")
    assert repr(loaded) == repr(trace)
    assert str(lockstep.run(loaded, keydiff.reference)) == str(lockstep.run(trace, keydiff.reference))


def test_a_turn_takes_the_place_of_its_steps(monkeypatch):
    calls = []
    for name in ("step", "append_block"):
        original = getattr(lockstep.Lockstep, name)

        def called(self, query, *rest, name=name, original=original, **more):
            calls.append((name, query.shape[2] if query.dim() == 4 else 1))
            return original(self, query, *rest, **more)

        monkeypatch.setattr(lockstep.Lockstep, name, called)
    h2o = pair("h2o")
    lockstep.run(StateTrace(
        method="h2o", config=(("budget", 4), ("block_size", 2)), prompt=3, steps=6, turns=((1, 3),),
    ), h2o.reference)
    assert calls == [("step", 1), ("append_block", 3), ("step", 1), ("step", 1)]


def test_tables_of_variants_replace_those_of_one_name():
    assert named("no-prompt", "epikv").options != named("no-prompt").options
    assert checkers.ask("streaming_llm", "VARIANTS", ()) and len(
        [one for one in variants.variants_of("streaming_llm") if one.name == "budget-of-1"]
    ) == 1


def test_states_are_judged_by_the_same_methods():
    assert {pair.name for pair in discovery.methods()} == {
        one.method for one in subjects.every() if isinstance(one, subjects.StateSubject)
    }
