"""`Capabilities`: what a declaration may say, which calls are outside of it, and that strategies draw inside of it."""

from __future__ import annotations

import types
from contextlib import suppress
from dataclasses import dataclass

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.errors import Unsatisfiable

from kvtwin.conformance import Capabilities, capabilities, discovery, stats
from kvtwin.conformance.cases.block_cases import attend_cases
from kvtwin.conformance.cases.fp8_cases import fp8_cases
from kvtwin.conformance.cases.in_pages import paged_decode_cases, paged_fp8_cases, paged_key_cases
from kvtwin.conformance.cases.key_cases import fp8_key_cases, key_cases
from kvtwin.conformance.cases.paged_states import filled_pages
from kvtwin.conformance.cases.paged_view import PagedLayout
from kvtwin.conformance.cases.strategies import decode_cases, state_traces, window_cases
from kvtwin.conformance.harness import impl
from kvtwin.conformance.judge import checkers, subjects
from kvtwin.conformance.judge.subjects import StateSubject


@pytest.mark.parametrize(("declared", "error", "says"), [
    ({"dtypes": ("int8",)}, ValueError, "dtypes must be 'float32' or 'float16' or 'bfloat16', got 'int8'"),
    ({"dtypes": "float16"}, TypeError, "dtypes must be a tuple"),
    ({"head_dims": ()}, TypeError, "head_dims must be a tuple with at least one value"),
    ({"head_dims": (64, 0)}, ValueError, "head_dims must be at least 1, got 0"),
    ({"groups": (2.0,)}, TypeError, "groups must hold ints, got 2.0"),
    ({"max_batch": True}, TypeError, "max_batch must hold ints, got True"),
    ({"masks": 1}, TypeError, "masks must be a bool, got 1"),
    ({"per_head": (None,)}, ValueError, "per_head must be False or True, got None"),
    ({"devices": ("tpu",)}, ValueError, "devices must be 'cpu' or 'cuda', got 'tpu'"),
    ({"ties": "first"}, ValueError, "ties must be 'lowest' or 'any', got 'first'"),
    ({"fp8": ("float8_e4m3fnuz",)}, ValueError, "fp8 must be 'float8_e4m3fn' or 'float8_e5m2', got 'float8_e4m3fnuz'"),
    ({"fp8": "float8_e5m2"}, TypeError, "fp8 must be a tuple"),
    ({"page_sizes": (0,)}, ValueError, "page_sizes must be at least 1, got 0"),
    ({"options": {"kernel_size": 5}}, TypeError, "options must map names to tuples"),
    ({"max_slots": 8, "slots_multiple_of": 16}, ValueError, "max_slots must be at least slots_multiple_of = 16"),
])
def test_a_declaration_that_makes_no_sense_is_refused(declared, error, says):
    with pytest.raises(error, match=says):
        Capabilities(**declared)


def test_dtypes_may_be_torch_s():
    assert Capabilities(dtypes=(torch.float16, "bfloat16")).dtypes == ("float16", "bfloat16")
    assert Capabilities(fp8=(torch.float8_e5m2,)).fp8 == ("float8_e5m2",)


def test_no_fp8_is_shown():
    assert Capabilities(fp8=(), page_sizes=(16, 32)).outside() == ["fp8 = none", "page_sizes = 16, 32"]


def test_the_declaration_of_the_method_comes_first():
    own, common = Capabilities(max_batch=1), Capabilities(max_batch=2)
    package = types.SimpleNamespace(CAPABILITIES=common)
    assert capabilities.find(types.SimpleNamespace(CAPABILITIES=own), package) is own
    assert capabilities.find(types.SimpleNamespace(), package) is common
    assert capabilities.find(types.SimpleNamespace()) == Capabilities()
    with pytest.raises(TypeError, match=r"must be a kvtwin\.conformance\.Capabilities, got dict"):
        capabilities.find(types.SimpleNamespace(CAPABILITIES={}))


def test_what_released_code_does_is_tested_only_if_it_is_declared():
    silent, all_of_it = capabilities.of_others(Capabilities()), Capabilities(options=capabilities.ALL)
    assert not silent.outside() and capabilities.of_others(all_of_it) == all_of_it
    for name, (first, *others) in capabilities.READINGS.items():
        defaults = [found[name] for found in map(_defaults, discovery.methods()) if name in found]
        assert defaults == [first], f"{name} belongs to one method, whose default is the first value"
        for value in others:
            assert capabilities.refusal(silent, call(**{name: value})) == name
            assert capabilities.refusal(all_of_it, call(**{name: value})) is None
            assert capabilities.refusal(capabilities.DEFAULT, call(**{name: value})) is None
        assert capabilities.refusal(silent, call(**{name: first})) is None
    for declared, refused in ((silent, "softcap"), (all_of_it, None), (capabilities.DEFAULT, None)):
        assert capabilities.refusal(declared, call(softcap=2.0)) == refused


def _defaults(pair):
    return checkers.ask(pair.name, "DEFAULTS", {})


def test_kvtwins_own_sides_need_no_declaration():
    for name, expected in ((discovery.OPTIMIZED, Capabilities()), ("theirs", capabilities.of_others(Capabilities()))):
        facade = impl.Facade(name, types.SimpleNamespace(longflow=types.SimpleNamespace()))
        assert facade.capabilities("longflow") == expected


def call(**changes):
    """The arguments of a decode step that every implementation takes, with changes."""
    query, key = torch.zeros(2, 6, 64), torch.zeros(2, 2, 32, 64)
    return {
        "query": query, "key": key, "value": key, "occupied": torch.ones(2, 32, dtype=torch.bool), "protected": None,
        "scale": None, "per_head": False, **changes,
    }


@dataclass(frozen=True)
class Config:
    budget: int = 4
    per_head: bool = True


@pytest.mark.parametrize(("declared", "changes", "refused"), [
    ({"dtypes": ("float16",)}, {}, "dtypes"),
    ({"head_dims": (128,)}, {}, "head_dims"),
    ({"groups": (1, 2)}, {}, "groups"),
    ({"kv_heads": (8,)}, {}, "kv_heads"),
    ({"max_batch": 1}, {}, "max_batch"),
    ({"max_slots": 31}, {}, "max_slots"),
    ({"slots_multiple_of": 64}, {}, "slots_multiple_of"),
    ({"masks": False}, {"occupied": torch.zeros(2, 32, dtype=torch.bool)}, "masks"),
    ({"protected": False}, {"protected": torch.ones(2, 32, dtype=torch.bool)}, "protected"),
    ({"scale": False}, {"scale": 0.5}, "scale"),
    ({"per_head": (True,)}, {}, "per_head"),
    ({"per_head": (False,)}, {"per_head": True}, "per_head"),
    ({"per_head": (True,)}, {"per_head": None, "shared_heads": True}, "per_head"),
    ({"per_head": (False,)}, {"config": Config(), "per_head": None}, "per_head"),
    ({"contiguous_only": True}, {"key": torch.zeros(2, 32, 2, 64).transpose(1, 2)}, "contiguous_only"),
    ({"devices": ("cuda",)}, {}, "devices"),
    ({"options": {"kernel_size": (5,)}}, {"kernel_size": 3}, "kernel_size"),
    ({"options": {"budget": (8,)}}, {"config": Config()}, "budget"),
], ids=lambda value: ",".join(value) if isinstance(value, dict) else None)  # fmt: skip
def test_a_call_outside_of_a_capability_is_refused(declared, changes, refused):
    assert capabilities.refusal(Capabilities(), call(**changes)) is None
    assert capabilities.refusal(Capabilities(**declared), call(**changes)) == refused


@pytest.mark.parametrize("declared", [{"head_dims": (64,)}, {"options": {"order": ("position",)}}], ids=str)
@pytest.mark.parametrize("changes", [
    {"value": torch.zeros(2, 2, 32, 64, dtype=torch.float64)}, {"key": torch.zeros(2, 2, 32, 64, dtype=torch.int64)},
    {"key": torch.zeros(2, 2, 32, 64, dtype=torch.float8_e5m2fnuz)},
    {"query": torch.zeros(2, 6, 64, device="meta")}, {"dtype": torch.complex64},
], ids="-".join)  # fmt: skip
def test_arguments_that_cannot_be_declared_are_checked_by_the_implementation(declared, changes):
    assert capabilities.refusal(Capabilities(**declared), call(**changes)) is None


def paged_call(**changes):
    """The same over pages of 4 slots."""
    given = call(**changes)
    key, value = given.pop("key"), given.pop("value")
    return {**given, "pages": filled_pages(PagedLayout(4), key, value)}


CODES = torch.zeros(2, 2, 32, 64).to(torch.float8_e4m3fn)


@pytest.mark.parametrize(("declared", "changes", "refused"), [
    ({"page_sizes": (16,)}, {}, "page_sizes"),
    ({"dtypes": ("float16",)}, {}, "dtypes"),
    ({"fp8": ("float8_e5m2",)}, {"key": CODES, "value": CODES}, "fp8"),
    ({"fp8": ()}, {"key": CODES, "value": CODES}, "fp8"),
    ({"head_dims": (128,)}, {}, "head_dims"),
    ({"groups": (1, 2)}, {}, "groups"),
    ({"kv_heads": (8,)}, {}, "kv_heads"),
    ({"max_batch": 1}, {}, "max_batch"),
    ({"max_slots": 31}, {}, "max_slots"),
    ({"slots_multiple_of": 64}, {}, "slots_multiple_of"),
    ({"masks": False}, {"occupied": torch.zeros(2, 32, dtype=torch.bool)}, "masks"),
], ids=lambda value: ",".join(value) if isinstance(value, dict) else None)  # fmt: skip
def test_a_call_over_pages_outside_of_a_capability_is_refused(declared, changes, refused):
    assert capabilities.refusal(Capabilities(), paged_call(**changes)) is None
    assert capabilities.refusal(Capabilities(**declared), paged_call(**changes)) == refused
    pages = paged_call(**changes)["pages"]
    apart = {name: tensor.transpose(0, 1).contiguous().transpose(0, 1) for name, tensor in pages._asdict().items()}
    made = {**paged_call(**changes), "pages": pages._replace(**apart)}
    assert capabilities.refusal(Capabilities(contiguous_only=True), made) == "contiguous_only"


def test_fp8_is_no_other_dtype():
    """With dtypes declared, a call with FP8 keys and values is inside if its query is."""
    for made in (call, paged_call):
        given = made(key=CODES, value=CODES)
        assert capabilities.refusal(Capabilities(dtypes=("float32",)), given) is None
        assert capabilities.refusal(Capabilities(dtypes=("float16",)), given) == "dtypes"


def test_what_a_constructor_gets_is_seen_too():
    sizes = {
        "batch": 4, "query_heads": 8, "key_value_heads": 2, "head_dim": 64, "dtype": torch.float16, "device": "cpu",
    }
    for declared, refused in (
        ({"max_batch": 2}, "max_batch"), ({"groups": (1,)}, "groups"), ({"head_dims": (32,)}, "head_dims"),
        ({"kv_heads": (1,)}, "kv_heads"), ({"dtypes": ("bfloat16",)}, "dtypes"), ({"devices": ("cuda",)}, "devices"),
    ):
        assert capabilities.refusal(Capabilities(**declared), sizes) == refused
    assert capabilities.refusal(Capabilities(), sizes) is None


@pytest.mark.parametrize("wrong", [
    {"occupied": torch.ones(2, 9, dtype=torch.bool, device="meta")}, {"query_heads": 2, "key_value_heads": 0},
    {"key": torch.zeros(2, 0, 9, 8)}, {"occupied": torch.ones(2, 9).to_sparse()}, {"key": [1, 2]}
], ids=",".join)
def test_wrong_arguments_are_left_to_the_implementation(wrong):
    """They are no refusal, and no error of ours."""
    assert capabilities.refusal(Capabilities(masks=False, groups=(1, 2, 4)), call(**wrong)) is None
    assert capabilities.refusal(Capabilities(), call(**wrong)) is None


NARROW = Capabilities(
    dtypes=("float16",), head_dims=(64, 96), groups=(4,), max_batch=1, masks=False, protected=False, scale=False,
    per_head=(False,), contiguous_only=True, slots_multiple_of=8, options={"kernel_size": (3,), "anchor": ("mean",)},
    page_sizes=(2, 12), fp8=("float8_e5m2",), max_slots=40,
)
STRATEGIES = {
    "decode": decode_cases, "window": window_cases, "keys": key_cases, "attend": lambda: attend_cases("h2o"),
    "state": lambda: state_traces("longflow"), "decode_fp8": fp8_cases, "decode_pages": paged_decode_cases,
    "decode_pages_fp8": paged_fp8_cases, "keys_pages": paged_key_cases, "keys_fp8": fp8_key_cases,
}


@pytest.mark.parametrize("strategy", STRATEGIES.values(), ids=STRATEGIES)
@given(data=st.data())
@settings(suppress_health_check=list(HealthCheck))
def test_strategies_draw_inside(strategy, data):
    with capabilities.use(NARROW):
        case = data.draw(strategy())
    assert getattr(case, "fp8", "e5m2") == "e5m2"
    assert case.dtype == (torch.float8_e5m2 if strategy is fp8_key_cases else torch.float16)
    assert case.head_dim in (64, 96) and case.batch == 1
    assert case.layout == "contiguous" and case.scale is None
    assert getattr(case, "occupancy", "full") in ("full", "none") and getattr(case, "padding", "none") == "none"
    assert getattr(case, "protect", "none") == "none" and not getattr(case, "per_head", False)
    assert getattr(case, "slots", 8) % 8 == 0 and getattr(case, "tokens", 8) % 8 == 0
    assert getattr(case, "kernel_size", 3) == 3 and getattr(case, "anchor", "mean") == "mean"
    assert getattr(case, "slots", 8) <= 40 and getattr(case, "page_size", 2) in (2, 12)
    if hasattr(case, "query"):
        assert case.group == 4


def test_a_property_outside_of_the_capabilities_has_no_case():
    """The strategy rejects the example, and says why."""
    (subject,) = (one for one in subjects.every() if str(one) == "longflow.decode_attention")

    @given(case=subject.draw("free_slots"))
    @settings(suppress_health_check=list(HealthCheck), database=None)
    def draws(case):
        raise AssertionError("there is no such case")

    with capabilities.use(NARROW), stats.collect() as counted, pytest.raises(Unsatisfiable):
        draws()
    assert set(counted.refused) == {"not declared: masks"}


@pytest.mark.parametrize(("prop", "argument", "declared"), [
    ("free_slots", None, Capabilities(masks=False)), ("layouts", "layout", Capabilities(contiguous_only=True)),
    ("accuracy", None, Capabilities(fp8=())), ("accuracy", None, capabilities.of_others(Capabilities())),
], ids=["masks", "contiguous_only", "fp8", "readings"])
def test_what_is_not_declared_is_refused_before_anything_is_drawn(prop, argument, declared):
    """So Hypothesis knows that there is no other case. Otherwise it would try 458 times."""
    refused = 0
    for subject in subjects.every():
        if prop not in subject.properties:
            continue
        values = {} if argument is None else {argument: subject.properties[prop][argument][:1]}

        @given(case=subject.draw(prop, **values))
        @settings(max_examples=1, database=None, suppress_health_check=list(HealthCheck))
        def draws(case):
            pass

        with capabilities.use(declared), stats.collect() as counted, suppress(Unsatisfiable):
            draws()
        assert sum(counted.refused.values()) <= 3, f"{subject}: {counted.refused}"  # .map() asks three times
        refused += len(counted.refused)
    assert refused


#: Functions that know no free slots.
WITHOUT_MASKS = (
    "select_representatives", "cluster_heads", "quantize", "dequantize", "shrink", "pack", "unpack", "page_scores",
    "budgets",
)


def test_every_state_is_a_subject_and_every_function_has_its_properties():
    for subject in subjects.every():
        needed = {"accuracy", "decisions", "repeatability", "independence", "layouts", "free_slots"}
        if subject.name in WITHOUT_MASKS:
            needed -= {"free_slots"}
        assert needed <= subject.properties.keys(), subject
        assert isinstance(subject, StateSubject) == subject.name.endswith("State")
