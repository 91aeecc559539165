"""What a verdict rests on: limits, counts, and the declared dtypes that it needs."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import hypothesis
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import beta, binom

from kvtwin.conformance import Capabilities, capabilities, stats
from kvtwin.conformance.cases import draws, supported
from kvtwin.conformance.cases.block_cases import PositionsCase
from kvtwin.conformance.cases.case import Case, DecodeCase
from kvtwin.conformance.cases.fp8_cases import Fp8Case
from kvtwin.conformance.cases.state_trace import StateTrace
from kvtwin.conformance.harness import impl, power, verdict, verdict_table
from kvtwin.conformance.harness.results import Result
from kvtwin.conformance.judge import calls, compare, subjects
from kvtwin.conformance.judge.properties import CORE, PROPERTIES
from kvtwin.conformance.stats import JudgedCase
from kvtwin.reference import longflow

DTYPES = ("float32", "float16", "bfloat16")

# Limits --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("judged", [1, 2, 59, 300, 12_800, 10**7])
def test_the_limit_without_a_wrong_one_has_a_closed_form(judged):
    assert power.upper_limit(0, judged) == pytest.approx(1 - 0.05 ** (1 / judged), rel=1e-7)
    assert power.upper_limit(0, judged) == pytest.approx(beta.ppf(0.95, 1, judged), rel=1e-9)


@pytest.mark.parametrize(("wrong", "judged"), [(1, 10), (3, 50), (40, 4000), (9, 10)])
def test_the_limit_is_exact(wrong, judged):
    """At the limit, so few are wrong with a probability of 5 %."""
    assert binom.cdf(wrong, judged, power.upper_limit(wrong, judged)) == pytest.approx(0.05, rel=1e-6)


def test_the_limit_at_its_ends():
    assert power.upper_limit(7, 7) == 1.0
    for wrong, judged in ((0, 0), (-1, 3), (4, 3)):
        with pytest.raises(ValueError, match="must be in 0"):
            power.upper_limit(wrong, judged)


@pytest.mark.parametrize(("judged", "text"), [
    (12_800, "1 in 4,270"), (298, "1 in 99"), (299, "1 in 100"), (9_360, "1 in 3,120"), (5, "1 in 2"), (4, ""),
    (10**6, "1 in 333 k"), (10**7, "1 in 3.33 M"), (10**8, "1 in 33.3 M"),
])  # fmt: skip
def test_limits_are_rounded_to_the_safe_side(judged, text):
    limit = power.limit_of("decisions", "decisive", {"decisive": judged})
    assert power.fewer_than(limit) == text
    if text:
        number, _, letter = text.removeprefix("1 in ").replace(",", "").partition(" ")
        shown = float(number) * {"": 1, "k": 1e3, "M": 1e6}[letter]
        assert shown <= 1 / limit < 1.01 * (shown + 1)


def test_large_counts_are_short():
    assert [power.short(10**n) for n in (0, 4, 5, 6, 7, 8, 9)] == [
        "1", "10,000", "100 k", "1.00 M", "10.0 M", "100 M", "1.00 G",
    ]  # fmt: skip
    assert power.short(999_999) == "999 k"


def test_arguments_that_are_listed_have_no_limit():
    assert power.limit_of("bad_input", "cases", {"cases": 100}) is None
    assert power.limit_of("ties", "cases", {"cases": 0}) is None
    assert power.fewer_than(None) == ""


# Counts --------------------------------------------------------------------------------------------------------------


def include(case: Case, *, choice: bool = False, decisive: int = 0, subject: str = "f") -> None:
    inner = stats.Stats(
        total=decisive, decisive=decisive, asked=choice, bound_utilisation=None if choice else 0.5, elements=10
    )
    stats.include(inner, judged=True, choice=choice, decides=choice, case=case, subject=subject)


def test_a_case_counts_once():
    with stats.collect() as found:
        for case in (DecodeCase(slots=5, batch=2), DecodeCase(slots=9), DecodeCase(slots=5, batch=2)):
            include(case)
    assert (found.cases, found.elements) == (2, 20)
    assert power.described_cases(found.judged.values()) == {
        "dtypes": {"float32": 2}, "layouts": {"contiguous": 2}, "rows": 3, "slots": 9,
    }  # fmt: skip
    with stats.collect() as found:
        for _ in range(2):
            include(DecodeCase(slots=5), choice=True, decisive=3)
    assert (found.cases, found.total, found.decisive, found.elements) == (1, 3, 3, 0)


def test_cases_of_given_tensors_and_of_other_functions_are_others():
    """Descriptions of given tensors are equal."""
    key = torch.zeros(1, 1, 4, 16)
    with stats.collect() as found:
        for _ in range(2):
            stats.judged_case(DecodeCase.of(key[:, :, 0], key, key))
        stats.judged_case(DecodeCase(slots=3), "f")
        stats.judged_case(DecodeCase(slots=3), "g")
    assert found.cases == 4


@pytest.mark.parametrize(("case", "dtype", "slots"), [
    (DecodeCase(dtype=torch.float16, slots=7), "float16", 7), (StateTrace(prompt=5, steps=2), "float32", 7),
    (Fp8Case(fp8="e5m2", dtype=torch.bfloat16), "float8_e5m2", 1), (PositionsCase(slots=4), "", 4),
], ids=str)  # fmt: skip
def test_what_is_said_of_a_case(case, dtype, slots):
    with stats.collect() as found:
        stats.judged_case(case)
    (one,) = found.judged.values()
    assert (one.dtype, one.slots) == (dtype, slots)


def test_only_elements_with_a_finite_bound_count():
    truth = torch.tensor([1.0, 2.0, -math.inf, 4.0], dtype=torch.float64)
    bound = torch.tensor([0.1, math.inf, 0.0, 0.1], dtype=torch.float64)
    with stats.collect() as found:
        compare.assert_within(truth.float(), truth, bound)
    assert found.elements == 2
    with stats.collect() as found:
        compare.assert_same(truth, truth, what="copy", where=torch.tensor([True, False, False, True]))
        compare.assert_same(torch.arange(9), torch.arange(9), what="indices")
    assert found.elements == 2


def test_repeated_calls_are_counted():
    (subject,) = (one for one in subjects.every() if str(one) == "longflow.decode_attention")
    with stats.collect() as found:
        calls.leaves_nothing_behind(subject, longflow, DecodeCase(slots=3))
        calls.leaves_nothing_behind(subject, longflow, DecodeCase(slots=3))
    assert (found.launches, found.cases) == (6, 1)
    with stats.collect() as found:
        calls.rows_are_apart(subject, longflow, DecodeCase(slots=3, batch=3))
    assert (found.launches, found.cases) == (2, 1)


# Declared dtypes -----------------------------------------------------------------------------------------------------


def described(*dtypes: str, decisive: int = 4, layout: str = "contiguous") -> dict[str, JudgedCase]:
    """Two cases of each dtype."""
    return {f"{dtype} {n}": JudgedCase(dtype, layout, 2, 40, decisive) for dtype in dtypes for n in range(2)}


def result(judges: str, *dtypes: str, **changes: Any) -> Result:
    return Result(**{
        "nodeid": f"test_{judges}", "method": "longflow", "judges": judges, "subject": "longflow.decode_attention",
        "touched": True, "cases": 8, "judged": described(*dtypes), "decisions": 40, "decisive": 32, "elements": 600,
        "launches": 24, **changes,
    })  # fmt: skip


def judged(*found: Result, own: bool = False, **declared: Any) -> verdict.MethodVerdict:
    return verdict.judge(found, {"longflow": Capabilities(**declared)}, device="cpu", own=own)["longflow"]


def test_each_declared_dtype_is_needed():
    found = judged(*(result(name, "float32") for name in PROPERTIES))
    for name, one in found.properties.items():
        core = name in CORE
        assert one.verdict == (verdict.NOT_COVERED if core else verdict.RIGHT)
        assert one.why == ("not covered: float16, bfloat16" if core else "")
    assert found.verdict == verdict.NOT_COVERED
    assert judged(*(result(name, *DTYPES) for name in PROPERTIES)).verdict == verdict.RIGHT
    assert judged(*(result(name, "float32") for name in PROPERTIES), dtypes=("float32",)).verdict == verdict.RIGHT
    assert judged(*(result(name, "float32") for name in PROPERTIES), own=True).verdict == verdict.RIGHT


@pytest.mark.parametrize(("lacking", "expected", "why"), [
    ({"float16": "theirs: float16"}, verdict.NOT_COVERED, "not covered: float16 (refused)"),
    ({"float16": "environment: theirs: no such type"}, verdict.ENVIRONMENT, "float16: theirs: no such type"),
    ({"float16": ""}, verdict.RIGHT, ""),
])  # fmt: skip
def test_why_a_dtype_is_lacking(lacking, expected, why):
    """A test whose cases never have a dtype does not need it."""
    one = judged(result("accuracy", "float32", "bfloat16", lacking=lacking)).properties["accuracy"]
    assert (one.verdict, one.why) == (expected, why)


def test_each_function_is_judged_in_each_dtype_of_its_cases():
    other = {"subject": "longflow.compress_prefill"}
    one = judged(result("accuracy", *DTYPES), result("accuracy", "float32", **other)).properties["accuracy"]
    assert one.why == "not covered: float16, bfloat16"
    fields = [result("accuracy", dtype, judged_field=dtype) for dtype in DTYPES]
    assert judged(*fields).properties["accuracy"].verdict == verdict.RIGHT, "fields of one function"
    for without in ({"judged": {}}, {"judged": described("float8_e5m2")}, {"judged": described("")}):
        one = judged(result("accuracy", *DTYPES), result("accuracy", **other, **without)).properties["accuracy"]
        assert one.verdict == verdict.RIGHT, "they have no numbers, or FP8 alone"


def test_decisions_need_a_decisive_one_in_each_dtype():
    found = described("float32", "float16") | described("bfloat16", decisive=0)
    assert judged(result("decisions", judged=found)).properties["decisions"].why == "not covered: bfloat16"
    assert judged(result("free_slots", judged=found)).properties["free_slots"].verdict == verdict.RIGHT


def test_a_case_counts_once_although_it_has_several_fields():
    fields = [result("accuracy", *DTYPES, cases=8, judged_field=name) for name in ("output", "score")]
    one = judged(*fields).properties["accuracy"]
    assert one.cases == 6 + 2 * 2, "six that are described, and two more of each test"
    assert one.described["dtypes"] == dict.fromkeys(DTYPES, 2) and one.elements == 1200


# Drawn ---------------------------------------------------------------------------------------------------------------


def drawing(check: Any) -> tuple[Any, list[DecodeCase]]:
    """A test whose first cases are float32, and the cases that it judged. check(case): may refuse it."""
    seen = []

    @settings(max_examples=6, database=None, derandomize=True)
    @given(data=st.data())
    def test(data: Any) -> None:
        first = not seen and supported.dtypes(subjects.strategies.DTYPES)
        options = first[:1] if first else supported.dtypes(subjects.strategies.DTYPES)
        case = DecodeCase(dtype=data.draw(st.sampled_from(options[:1])), seed=data.draw(st.integers(0, 2**31 - 1)))
        check(case)
        seen.append(case)
        stats.judged_case(case)

    return test, seen


def drawn(test: Any, dtypes: tuple[str, ...] = DTYPES, **declared: Any) -> stats.Stats:
    with stats.collect() as found, capabilities.use(Capabilities(**declared)):
        draws.until_decided(test, "test_it[f-output]", 0, 0, dtypes)
    return found


@pytest.mark.parametrize(("quick", "least"), [(False, 2), (True, 1)])
def test_a_test_draws_on_until_it_has_judged_each_dtype(quick, least, monkeypatch):
    monkeypatch.setattr(draws, "is_quick", lambda: quick)
    test, _ = drawing(lambda case: None)
    before = test._hypothesis_internal_use_settings
    found = drawn(test)
    assert {dtype: found.judged_in(dtype) for dtype in DTYPES} == {"float32": 6, "float16": 2, "bfloat16": 2}
    assert draws.least_of_dtype() == least and not found.lacking
    assert test._hypothesis_internal_use_settings is before
    test, seen = drawing(lambda case: None)
    assert not drawn(test, ()).lacking and len(seen) == 6, "a run that needs no verdict draws no more"


def test_what_is_refused_is_recorded():
    def refuse(case: DecodeCase) -> None:
        if case.dtype == torch.float16:
            stats.record_refusal("theirs: float16")
            hypothesis.reject()

    test, _ = drawing(refuse)
    assert drawn(test).lacking == {"float16": "theirs: float16"}


def test_a_refused_dtype_is_given_up():
    calls = []

    def refuse(case: DecodeCase) -> None:
        if case.dtype == torch.float16:
            calls.append(case)
            impl._refused("theirs: float16")

    assert drawn(drawing(refuse)[0]).lacking == {"float16": "theirs: float16"}
    assert len(calls) == supported.MOST_REFUSALS


def test_a_dtype_may_be_the_only_one_that_is_not_refused():
    def refuse(case: DecodeCase) -> None:
        if case.dtype != torch.bfloat16:
            stats.record_refusal("theirs: dtype")
            hypothesis.reject()

    found = drawn(drawing(refuse)[0])
    assert found.judged_in("bfloat16") == 2 and set(found.lacking) == {"float32", "float16"}
    with pytest.raises(hypothesis.errors.Unsatisfiable):
        drawn(drawing(lambda case: hypothesis.reject())[0])


def test_drawing_ends_if_no_case_has_the_dtype():
    seen = []

    @settings(max_examples=6, database=None, derandomize=True)
    @given(seed=st.integers(0, 2**31 - 1))
    def test(seed: int) -> None:
        seen.append(seed)
        stats.judged_case(PositionsCase(seed=seed))

    assert drawn(test).lacking == dict.fromkeys(DTYPES, "")
    assert len(seen) == 6 + 3 * 2


def test_decisions_are_drawn_in_plain_cases_of_the_dtype(monkeypatch):
    monkeypatch.setattr(draws, "is_quick", lambda: False)

    @settings(max_examples=6, database=None, derandomize=True)
    @given(seed=st.integers(0, 2**31 - 1))
    def deciding(seed: int) -> None:
        (dtype, *_) = supported.dtypes(subjects.strategies.DTYPES)
        clear = dtype == torch.float32 or draws.plain_only()
        include(DecodeCase(dtype=dtype, seed=seed), choice=True, decisive=int(clear))

    found = drawn(deciding)
    assert not found.lacking and min(found.judged_in(dtype) for dtype in DTYPES) >= 2


#: Functions of positions, of bytes, and of preferences in float64.
WITHOUT_NUMBERS = ("cake.budgets", "random.score", "streaming_llm.keep", "thinkv.pack", "thinkv.unpack")


@pytest.mark.parametrize("subject", [
    pytest.param(one, id=str(one)) for one in subjects.every() if one.properties
])  # fmt: skip
def test_the_cases_of_every_function_and_state_come_in_every_dtype(subject):
    """Otherwise a verdict would not need them."""
    cases: dict[str, Case] = {}

    @settings(max_examples=1, database=None, derandomize=True)
    @given(data=st.data())
    def one_case(data: Any) -> None:
        for dtype in subject.dtypes:
            for plain in (False, True):
                with supported.only_dtype(dtype), (stats.plain_round() if plain else supported.only_dtype(dtype)):
                    cases[dtype] = data.draw(subject.draw("decisions"))
                    assert stats.dtype_of(cases[dtype]) in (dtype, "")

    one_case()
    numbers = {stats.dtype_of(case) for case in cases.values()} - {""}
    assert numbers == (set() if str(subject) in WITHOUT_NUMBERS else set(subject.dtypes))


# The table -----------------------------------------------------------------------------------------------------------


def table(found: verdict.MethodVerdict, *, verbose: bool = False) -> list[str]:
    return [text for text, _ in verdict_table.lines(found, "theirs", verbose=verbose)]


def test_each_line_says_what_it_rests_on():
    found = judged(
        *(result(name, *DTYPES) for name in PROPERTIES),
        result("decisions", decisions=13_000, decisive=12_768, cases=0, judged={}), result("accuracy", "float8_e4m3fn"),
    )
    lines = table(found)
    rows = {line[2:17].strip(): line[17:].split("  ") for line in lines[1:13]}
    cells = {name: [cell.strip() for cell in row if cell.strip()] for name, row in rows.items()}
    assert cells["decisions"] == ["right", "12,800 decisive", "< 1 in 4,270", "-"]
    assert cells["accuracy"] == ["right", "1,200 elements", "< 1 in 401", "-"]
    assert cells["repeatability"] == ["right", "24 launches", "< 1 in 8", "-"]
    assert cells["free slots"] == ["right", "8 cases", "< 1 in 3", "-"]
    assert cells["bad input"] == ["right", "8 cases", "-", "-"]
    assert "  cases: float32 22, float16 22, bfloat16 22, float8_e4m3fn 2; up to 40 slots; 136 rows; 1 layout" in lines
    verbose = table(found, verbose=True)
    assert verbose[verbose.index(lines[3]) + 1] == (
        "    float32 2, float16 2, bfloat16 2; up to 40 slots; 12 rows; layouts: contiguous 6"
    )


def test_the_rows_fit_in_80_columns():
    worst = {"bfloat16": 0.123}
    found = judged(*(
        result(name, *DTYPES, decisions=10**6, decisive=999_999, elements=10**7, launches=10**5, worst=worst)
        for name in PROPERTIES
    ))  # fmt: skip
    assert max(map(len, table(found)[1:11])) <= 80


def test_a_wrong_property_has_no_limit():
    finding = {"property": "decisions", "choice": True, "wrong": 3, "message": "another token"}
    found = judged(result("decisions", *DTYPES), result("decisions", outcome="failed", finding=finding))
    one = found.properties["decisions"]
    assert one.limit is None
    assert any("3 wrong, 64 of 80  -  " in line for line in table(found))
    assert dataclasses.replace(one, limit=0.5).counts["decisive"] == 64
