"""``--kv-impl``: other people's modules, right, wrong and incomplete.

The implementations here are small: each wraps a right one and breaks one thing.
"""

from __future__ import annotations

import json
import operator
import os
import sys
import types
from collections import namedtuple
from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest
from hypothesis import settings

from kvtwin.conformance import discovery, stats
from kvtwin.conformance.harness import impl, verdict

pytest_plugins = ["pytester"]


class Result(NamedTuple):
    output: int
    slot: int


@dataclass
class Record:
    slot: int
    extra: int
    output: int


@pytest.mark.parametrize(
    "value",
    [
        (1, 2),
        [1, 2],
        {"slot": 2, "output": 1},
        {"slot": 2, "output": 1, "extra": 3},
        namedtuple("Theirs", "slot output")(2, 1),
        Record(slot=2, extra=3, output=1),
        types.SimpleNamespace(slot=2, output=1),
        Result(1, 2),
    ],
    ids=repr,
)
def test_results_are_taken_by_name_else_in_order(value):
    assert impl.normalise(value, Result, "theirs") == Result(output=1, slot=2)


@pytest.mark.parametrize(
    "value", [None, 1, (1,), (1, 2, 3), {"other": 1}, types.SimpleNamespace(), (None, None)], ids=repr
)
def test_a_result_without_our_fields_is_wrong(value):
    with pytest.raises(TypeError, match=r"theirs\.decode returned a .*; expected .* output, slot"):
        impl.normalise(value, Result, "theirs.decode")


@pytest.fixture
def provide(monkeypatch: pytest.MonkeyPatch):
    """Make a module with the given attributes importable, and return the twins for it."""

    def make(**attributes: Any) -> impl.Twins:
        module = types.ModuleType("theirs")
        vars(module).update(attributes)
        monkeypatch.setitem(sys.modules, "theirs", module)
        return impl.Twins("theirs")

    return make


def decode(*arguments: Any) -> tuple[int, int, int]:
    return 1, 2, 3


def test_methods_are_attributes_and_results_become_ours(provide):
    twins = provide(longflow=types.SimpleNamespace(decode_attention=decode))
    result = twins.optimized.longflow.decode_attention()
    assert result == twins.reference.longflow.DecodeResult(output=1, score=2, slot=3)
    assert type(result).__name__ == "DecodeResult"


@pytest.mark.parametrize("nested", [True, False])
def test_baselines_are_found_in_their_folder_or_beside_the_methods(provide, nested):
    snapkv = types.SimpleNamespace(compress=decode, window_score=lambda: "a tensor")
    twins = provide(baselines=types.SimpleNamespace(snapkv=snapkv)) if nested else provide(snapkv=snapkv)
    found = twins.optimized.baselines.snapkv
    assert found.compress() == twins.reference.baselines.snapkv.CompressResult(1, 2, 3)
    assert found.window_score() == "a tensor"  # not one of our result types: returned unchanged


def test_submodules_are_imported_and_their_faults_are_not_absences(pytester, monkeypatch):
    package = pytester.mkpydir("their_package")
    package.joinpath("longflow.py").write_text("def decode_attention(): return 1, 2, 3")
    package.joinpath("snapkv.py").write_text("import a_module_that_is_not_installed")
    pytester.syspathinsert()
    twins = impl.Twins("their_package")
    assert twins.optimized.longflow.decode_attention().slot == 3
    with pytest.raises(ImportError, match="a_module_that_is_not_installed"):
        twins.optimized.baselines.snapkv  # noqa: B018


def test_configs_and_results_are_ours(provide):
    """These types are defined once, on our side. A class of the same name on their side is not used."""
    theirs = provide(longflow=types.SimpleNamespace(LongFlowConfig="their own", decode_attention=decode)).optimized
    assert theirs.longflow.LongFlowConfig is impl.Twins().reference.longflow.LongFlowConfig


@pytest.mark.parametrize(
    ("attributes", "path"),
    [
        ({}, "longflow"),
        ({}, "baselines.snapkv"),
        ({"longflow": types.SimpleNamespace()}, "longflow.LongFlowState"),
        ({"longflow": types.SimpleNamespace(decode_attention=None)}, "longflow.decode_attention"),
    ],
)
def test_what_is_missing_is_not_provided(provide, attributes, path):
    find = operator.attrgetter(path)
    with pytest.raises(impl.NotProvided, match=r"^not provided: theirs\."):
        find(provide(**attributes).optimized)


def test_a_name_that_is_not_ours_is_a_fault_of_the_test(provide):
    """Otherwise a misspelt name in a test would be *not provided* for every implementation."""
    side = provide(longflow=types.SimpleNamespace(decode_attention=decode)).optimized
    for path, complaint in (("longflwo", "no method 'longflwo'"), ("longflow.decode_atention", "no 'decode_atention'")):
        with pytest.raises(BaseException, match=complaint) as caught:  # a skip would pass by AttributeError
            operator.attrgetter(path)(side)
        assert caught.type is AttributeError


def test_a_test_is_seen_to_touch_the_implementation(provide):
    twins = provide(longflow=types.SimpleNamespace(decode_attention=decode))
    with stats.collect() as counted:
        twins.optimized.longflow.LongFlowConfig  # noqa: B018
        assert not counted.touched
        twins.optimized.longflow.decode_attention  # noqa: B018
        assert counted.touched


def test_our_own_side_is_the_real_modules():
    twins = impl.Twins()
    for pair in discovery.pairs():
        assert operator.attrgetter(pair.path)(twins.optimized) is pair.optimized


def test_what_their_package_warns_of_when_it_is_imported_is_theirs(pytester):
    warn = "import warnings; warnings.warn('old', DeprecationWarning)"
    package = pytester.mkpydir("their_package")
    package.joinpath("__init__.py").write_text(warn)
    package.joinpath("longflow.py").write_text(f"{warn}\ndef decode_attention(): return 1, 2, 3")
    pytester.makepyfile("def test_it(twins): twins.optimized.longflow.decode_attention()")
    pytester.syspathinsert()
    run(pytester, "--kv-impl", "their_package", "-W", "error::DeprecationWarning").assert_outcomes(passed=1)


def test_an_implementation_that_cannot_be_imported_is_a_usage_error(pytester):
    pytester.makepyfile("def test_it(): pass")
    result = run(pytester, "--kv-impl", "no_such_module")
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines(["*--kv-impl no_such_module: cannot import it*"])


@pytest.mark.parametrize("name", ["", "..x", "./theirs.py", "theirs/longflow", "theirs.", "a b", "\ud800"])
def test_an_implementation_is_the_name_of_a_module(name):
    with pytest.raises(pytest.UsageError, match=r"--kv-impl '.*': expected the name of a module"):
        impl.Twins(name)


@pytest.mark.parametrize(("statement", "says"), [
    ("raise ValueError('no kernels here')", "it raised ValueError: no kernels here"),
    ("import sys; sys.exit(3)", "it raised SystemExit: 3"), ("1 +", "it raised SyntaxError"),
])
def test_an_import_that_raises_is_a_usage_error(pytester, statement, says):
    pytester.makepyfile("def test_it(): pass")
    pytester.makepyfile(theirs=statement)
    pytester.syspathinsert()
    result = run(pytester, "--kv-impl=theirs")
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines([f"*--kv-impl theirs: cannot import it: {says}*"])


# --- the suite on other people's modules ---

# Each wraps a right implementation, with the given dtypes and device, and breaks one thing.
WRAPPED = """
from kvtwin.conformance.lab.implementations.longflow import Decode
from kvtwin.reference.longflow import DecodeResult

class right:
    decode_attention = staticmethod(lambda *args, **options: DecodeResult(*Decode()(*args, **options)))

def decode_attention(query, key, value, occupied, **options):
    def again(query=query, occupied=occupied):
        return right.decode_attention(query, key, value, occupied, **options)

    def mirrored():
        flipped = key.flip(2), value.flip(2), occupied.flip(-1)
        protected = options["protected"]
        options["protected"] = None if protected is None else protected.flip(-1)
        return right.decode_attention(query, *flipped, **options)

    output, score, slot = again()
    {spoil}
    return {{"slot": slot, "score": score, "output": output}}
"""
RIGHT = "pass"
SPOILED = {  # the broken part: how, and the judge's message
    "slot": ("slot = (slot + 1) % key.shape[2]", "slot: row * pick* slot *"),
    "ties": ("slot = key.shape[2] - 1 - mirrored().slot", "slot: row * pick*"),
    "mask": ("slot = again(occupied=occupied | True).slot", "slot: row * pick*"),
    "scale": ("output = again(query=1.01 * query).output", "output: * beyond their bound*"),
    "score": ("score = score * 1.001", "score: * beyond their bound*"),
    "rounding": ("output = output.bfloat16().to(output.dtype)", "output: * beyond their bound*"),
    "shape": ("output = output[:, None]", "output: expected shape *"),
    "type": ("slot = slot.int()", "slot: expected int64 *"),
}
JUDGED = """
import torch
from hypothesis import Phase, given, settings
from kvtwin.conformance.cases import strategies
from kvtwin.conformance.judge.checkers.longflow import assert_decode_right

# The same examples every time; a failure is enough, it need not be small. In float32, whose numbers change when they
# are rounded to bfloat16: a run on a GPU draws few dtypes.
@settings(max_examples=100, phases=[Phase.generate], derandomize=True, database=None)
@given(case=strategies.decode_cases(slots=(1, 12), dtypes=(torch.float32,)))
def test_decode(twins, case):
    assert_decode_right(twins.optimized.longflow.decode_attention(**case.inputs), case)
"""


def run(pytester: pytest.Pytester, *arguments: str) -> pytest.RunResult:
    profile = ("--hypothesis-profile", settings.get_current_profile_name())
    return pytester.runpytest_inprocess("-p", "no:cacheprovider", *profile, *arguments)


def judge_it(pytester: pytest.Pytester, spoil: str, *arguments: str) -> pytest.RunResult:
    pytester.makepyfile(test_judged=JUDGED)
    make_their_kernels(pytester, spoil)
    pytester.syspathinsert()
    return run(pytester, "--kv-impl", "their_kernels", *(arguments or ["test_judged.py"]))


def make_their_kernels(pytester: pytest.Pytester, spoil: str) -> None:
    package = pytester.mkpydir("their_kernels")
    package.joinpath("longflow.py").write_text(WRAPPED.format(spoil=spoil))


def test_a_right_implementation_passes(pytester):
    result = judge_it(pytester, RIGHT)
    result.assert_outcomes(passed=1)
    result.stdout.fnmatch_lines(["kvtwin under test: their_kernels (*their_kernels*__init__.py)"])


def test_limits_of_our_kernels_are_not_those_of_others(pytester):
    pytester.makepyfile(test_longflow_input="""
        import pytest

        @pytest.mark.limits
        def test_a_limit(twins):
            pass

        def test_a_wrong_argument(twins):
            assert twins.optimized.longflow.decode_attention
    """)
    pytester.makepyfile(theirs="from kvtwin.reference import longflow")
    pytester.syspathinsert()
    run(pytester, "--kv-device=auto", "test_longflow_input.py").assert_outcomes(passed=2)
    result = run(pytester, "--kv-impl=theirs", "test_longflow_input.py")
    result.assert_outcomes(passed=1, deselected=1)


@pytest.mark.parametrize(("spoil", "verdict"), SPOILED.values(), ids=SPOILED)
def test_a_wrong_implementation_is_caught(pytester, spoil, verdict):
    result = judge_it(pytester, spoil)
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines([f"E  *: {verdict}"])


@pytest.mark.slow_on_cpu
@pytest.mark.parametrize(("spoil", "outcome"), [("pass", "passed"), (SPOILED["slot"][0], "failed")])
def test_the_real_suite_on_their_implementation(pytester, monkeypatch, spoil, outcome):
    """The smallest run: one test, found as with --pyargs. In a process of its own: pytester keeps what the failed test
    held, which may be 24 GB of a GPU."""
    name = "test_longflow_evicts_what_float64_would"
    make_their_kernels(pytester, spoil)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(pytester.path), os.environ.get("PYTHONPATH", "")]))
    result = pytester.runpytest_subprocess(
        "-p", "no:cacheprovider", "--hypothesis-profile", settings.get_current_profile_name(), "--kv-impl",
        "their_kernels", "--pyargs", "kvtwin.conformance.suite.longflow.test_longflow", "-k", name,
    )
    assert result.parseoutcomes()[outcome] == 1
    # One passed test covers no property.
    code, said = (verdict.EXIT_WRONG, "WRONG") if outcome == "failed" else (verdict.EXIT_NOT_COVERED, "NOT COVERED")
    assert result.ret == code
    result.stdout.fnmatch_lines([f"longflow of their_kernels: {said}"])


def test_a_partial_implementation_is_not_provided_and_not_passed(pytester):
    pytester.makepyfile(
        test_longflow="""
        def test_decode(twins): twins.optimized.longflow.decode_attention()
        def test_state(twins): twins.optimized.longflow.LongFlowState()
        def test_other_method(twins): twins.optimized.baselines.snapkv.compress()
        """
    )
    pytester.mkpydir("their_kernels").joinpath("longflow.py").write_text("def decode_attention(): return 1, 2, 3")
    pytester.syspathinsert()
    result = run(pytester, "--kv-impl", "their_kernels", "-rs")
    assert result.ret == verdict.EXIT_NOT_COVERED
    result.stdout.fnmatch_lines(
        [
            "*test_longflow.py .nn *",
            "longflow of their_kernels: NOT COVERED",
            "  not provided: their_kernels.baselines.snapkv, their_kernels.longflow.LongFlowState",
            "*= 1 passed,* 2 not provided in *",
        ]
    )


# --- arguments that they do not take ---

PARTIAL = """
from hypothesis import given, settings, strategies as st

few = settings(max_examples=5, derandomize=True, database=None)

@few
@given(count=st.sampled_from([1, 2, 3, 4, 5, 6, 7, 8]))
def test_longflow_some(twins, count):
    if count == 1:
        twins.optimized.longflow.decode_attention(count)
    else:
        twins.optimized.longflow.decode_attention(count, protected=True)

@few
@given(count=st.integers())
def test_longflow_all(twins, count):
    twins.optimized.longflow.decode_attention(count, protected=True)

def test_longflow_one(twins):
    twins.optimized.longflow.decode_attention(1, scale=1.0)

@few
@given(count=st.integers())
def test_longflow_of_no_example(twins, count):
    from hypothesis import assume
    assume(False)

def test_longflow_fails(twins):
    assert twins.optimized.longflow.decode_attention(1).slot == 4
"""
THEIRS = """
def decode_attention(count, **options):
    for name in options:
        raise NotImplementedError(name)
    return 1, 2, 3
"""


def test_what_they_refuse_is_passed_over_and_counted(pytester):
    """Refused examples neither pass nor fail, and are reported. A test without other examples is not provided."""
    pytester.makepyfile(test_longflow=PARTIAL)
    pytester.mkpydir("their_kernels").joinpath("longflow.py").write_text(THEIRS)
    pytester.syspathinsert()
    report = pytester.path / "report.json"
    ran = run(pytester, "--kv-impl", "their_kernels", "--kv-report", str(report))
    counts = {"passed": 1, "failed": 2, "not": 2}  # the outcome has two words: "2 not provided"
    assert {word: ran.parseoutcomes().get(word) for word in counts} == counts
    ran.stdout.fnmatch_lines(
        [
            "E *hypothesis.errors.Unsatisfiable*",
            "longflow of their_kernels: WRONG",
            "  calls: * answered, * refused: * x their_kernels.longflow.decode_attention: protected, "
            "1 x their_kernels.longflow.decode_attention: scale",
            "  other tests, which judge no single property: 1 failed",
        ]
    )
    tests = {test["nodeid"].split("::")[1]: test for test in json.loads(report.read_text())["tests"]}
    assert tests["test_longflow_some"]["answered"] > 0
    assert tests["test_longflow_all"]["answered"] == 0 < sum(tests["test_longflow_all"]["refused"].values())
    assert tests["test_longflow_fails"]["refused"] == {}
