"""The fixture model's accuracy with somebody's implementation: what decodes with it, and what is printed."""

from __future__ import annotations

import itertools
import sys
import types
from fractions import Fraction
from typing import Any

import pytest
import torch
from torch import Tensor

from kvtwin.conformance import Capabilities, cli, discovery
from kvtwin.conformance.cases import oracle
from kvtwin.conformance.harness import fair_play
from kvtwin.conformance.judge import bounds
from kvtwin.conformance.judge.compare import assert_same, assert_within
from kvtwin.conformance.methods.every_method.test_accuracy import Tiny
from kvtwin.fixtures import accuracy_of
from kvtwin.fixtures.accuracy import questions
from kvtwin.fixtures.accuracy_caches import States, config_of
from kvtwin.fixtures.accuracy_functions import FUNCTIONS
from kvtwin.fixtures.load import load_model
from kvtwin.reference import keydiff, longflow

pytestmark = pytest.mark.whole

SIZES = {"batch": 1, "query_heads": 8, "key_value_heads": 4, "head_dim": 16, "dtype": torch.float32, "device": "cpu"}
PAIRS = {pair.name: pair for pair in discovery.methods()}
of_functions = pytest.mark.parametrize("method", FUNCTIONS)


def attend(method: str, budget: int) -> Any:
    pair = PAIRS[method]
    _, decode = FUNCTIONS[method]
    return decode(pair.reference, pair.config(budget))


def tokens() -> list[Tensor]:
    """query, key and value of 30 tokens, [1, H, 30, 16]."""
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(1, heads, 30, 16, generator=generator) for heads in (8, 4, 4)]


def outputs(decode: Any, block: int) -> Tensor:
    """What `decode` makes of a prompt of 24 tokens in blocks, and of 6 steps: [1, 8, 30, 16]."""
    cuts = [*range(0, 24, block), *range(24, 31)]
    pieces = [slice(start, stop) for start, stop in itertools.pairwise(cuts)]
    given = tokens()
    return torch.cat([decode(0, *(tensor[:, :, piece] for tensor in given)) for piece in pieces], 2)


@of_functions
def test_with_room_for_all_a_function_is_full_attention(method):
    whole = [*tokens(), torch.ones(1, 30, dtype=torch.bool)]
    truth, bound = oracle.attend(*whole, causal=True).output, bounds.causal_output(*whole)
    assert_within(outputs(attend(method, 64), 24 if method == "longflow" else 8), truth, bound, what="output")


@pytest.mark.parametrize("method", ["keydiff", "longflow", "streaming_llm"])
def test_a_function_keeps_what_the_state_keeps(method):
    """SnapKV's state compresses at each step, too, and its function does not."""
    pair, block = PAIRS[method], 24 if method == "longflow" else 8
    state = getattr(pair.reference, pair.state.__name__)
    made, decode = States(lambda: state(pair.config(10), **SIZES), method != "longflow"), attend(method, 10)
    outputs(decode, block)
    outputs(made, block)
    for name in ("key", "value"):
        kept, expected = getattr(decode, name)[0], getattr(made.layers[0], name)[:, :, :10]
        assert_same(kept.sort(2).values, expected.sort(2).values, what=f"each channel of the {name}s, in order")


@of_functions
def test_functions_keep_the_budget(method):
    decode = attend(method, 10)
    outputs(decode, 24)
    assert decode.memory()["tokens_held"] == (16 if method == "snapkv" else 10)


# A module ------------------------------------------------------------------------------------------------------------


class Wrong:
    """`evict` that keeps the oldest tokens."""

    def __call__(self, key: Tensor, value: Tensor, budget: int, **options: Any) -> Any:
        kept = torch.arange(budget).expand(*key.shape[:2], -1)
        return key[:, :, :budget], value[:, :, :budget], kept, kept >= 0


@pytest.fixture
def theirs(monkeypatch):
    """A function that makes the module `theirs` of methods with these names."""

    def make(declared: Any = None, **provided: Any) -> None:
        module = types.ModuleType("theirs")
        for method, names in provided.items():
            setattr(module, method, types.SimpleNamespace(**names))
        if declared is not None:
            module.CAPABILITIES = declared
        monkeypatch.setitem(sys.modules, "theirs", module)
        monkeypatch.setattr(fair_play, "OWN", (*fair_play.OWN, "theirs"))  # it uses the reference

    monkeypatch.setattr(accuracy_of, "plan", lambda queries: Tiny(shares=(2, 6), queries=queries))
    return make


def test_a_state_comes_before_a_function(theirs):
    module = types.SimpleNamespace(decode_attention=1)
    assert accuracy_of.through(PAIRS["longflow"], module) == "decode_attention"
    module.LongFlowState = 1
    assert accuracy_of.through(PAIRS["longflow"], module) == "LongFlowState"
    assert accuracy_of.through(PAIRS["h2o"], module) is None


@pytest.mark.slow
def test_the_reference_answers_as_the_reference(theirs):
    theirs(longflow={"LongFlowState": longflow.LongFlowState}, keydiff={"evict": keydiff.evict})
    rows = accuracy_of.evaluate("theirs", plan=Tiny(queries=2))
    assert [(row.method, row.through, row.budget, row.share) for row in rows] == [
        ("keydiff", "evict", 120, Fraction(1)), ("keydiff", "evict", 20, Fraction(1, 6)),
        ("longflow", "LongFlowState", 120, Fraction(1)), ("longflow", "LongFlowState", 20, Fraction(1, 6)),
    ]
    for row in rows:
        assert row.theirs == row.reference
        assert row.theirs.keys() == {"recall", "arithmetic"}
        assert not row.failed
    assert rows[0].theirs["arithmetic"]["accuracy"] == 1


@pytest.mark.slow
def test_a_wrong_implementation_answers_otherwise(theirs, capsys):
    theirs(keydiff={"evict": Wrong()})
    assert cli.main(["accuracy", "--impl", "theirs", "--queries", "6"]) == 0
    head, half, _ = capsys.readouterr().out.splitlines()
    assert head.split("  ")[0] == "method"
    assert "recall %: reference, theirs" in head
    assert half.split()[:3] == ["keydiff", "evict", "60"]
    (row,) = accuracy_of.evaluate("theirs", plan=Tiny(shares=(2,), queries=6))
    assert row.theirs != row.reference


def test_an_error_is_a_result(theirs, capsys):
    def raises(*arguments: Any, **options: Any) -> Any:
        raise RuntimeError("out of slots")

    theirs(keydiff={"evict": raises})
    assert cli.main(["accuracy", "keydiff", "--impl", "theirs", "--queries", "1"]) == 1
    assert "RuntimeError: out of slots" in capsys.readouterr().out


@pytest.mark.slow
def test_declared_capabilities_are_respected(theirs, capsys):
    """The dtype is one that is declared. The model's sizes are fixed, so other sizes are refused."""
    seen = []

    def evict(key: Tensor, *arguments: Any, **options: Any) -> Any:
        seen.append(key.dtype)
        return keydiff.evict(key, *arguments, **options)

    theirs(Capabilities(dtypes=("bfloat16",)), keydiff={"evict": evict})
    (row,) = accuracy_of.evaluate("theirs", plan=Tiny(shares=(6,), queries=1))
    assert set(seen) == {torch.bfloat16}
    assert row.theirs == row.reference
    with pytest.raises(SystemExit):
        cli.main(["accuracy", "--impl", "theirs", "--queries", "1", "--dtype", "float16"])
    assert "keydiff must be one of those that theirs declares, bfloat16" in capsys.readouterr().err
    theirs(Capabilities(head_dims=(40,)), keydiff={"evict": evict})
    assert cli.main(["accuracy", "--impl", "theirs", "--queries", "1"]) == 0
    assert "not provided: theirs.keydiff.evict: head_dims (declared)" in capsys.readouterr().out


@pytest.mark.parametrize(("arguments", "complaint"), [
    (["--impl", "no_such_module_here"], "no_such_module_here"),
    (["--impl", "theirs"], "theirs has no state of any method"),
    (["keydiff", "--impl", "theirs"], "theirs has no state of keydiff"),
])
def test_wrong_usage(arguments, complaint, theirs, capsys):
    theirs()
    with pytest.raises(SystemExit) as stopped:
        cli.main(["accuracy", *arguments])
    assert stopped.value.code == 2
    assert complaint in capsys.readouterr().err


def test_the_default_plan_asks_as_the_stored_table_does():
    plan = accuracy_of.plan(3)
    assert (plan.length, plan.prompt, plan.block_size, plan.seed) == (1024, 896, 128, 0)
    assert len(questions(plan)) >= 2
    model = load_model(torch.float32, "cpu")
    for pair in PAIRS.values():
        for divisor in plan.shares:
            assert config_of(pair, model.config, plan.length, divisor, plan.block_size)
