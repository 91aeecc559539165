"""Tests of the strategies: they draw every pathology, contents have the properties of their names, and cases replay."""

from __future__ import annotations

import math
import resource
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, Phase, core, find, given, seed, settings
from hypothesis import strategies as st

from kvtwin.conformance import interpreter, stats
from kvtwin.conformance.cases import case as cases
from kvtwin.conformance.cases import contents, draws, layouts, saved, strategies
from kvtwin.conformance.cases.case import DecodeCase, WindowCase
from kvtwin.conformance.cases.state_trace import StateTrace
from kvtwin.conformance.harness.replay import main
from kvtwin.conformance.judge.checkers.longflow import assert_slot_right, rank_interval
from kvtwin.conformance.judge.compare import Mismatch
from kvtwin.conformance.judge.ties import tie_classes
from kvtwin.reference import longflow

CPU = torch.device("cpu")


BATCH = 50


def census(strategy: st.SearchStrategy, count: int, first: int = 0) -> list:
    """Draws from a strategy. A thousand are cheap, because cases make tensors only on request.

    Draws are in batches, with one seed each from `first` on, because Hypothesis varies earlier draws within a run.
    """
    seen = []
    for number in range(first, first + count // BATCH):

        @seed(number)
        @settings(
            max_examples=BATCH, database=None, deadline=None, phases=[Phase.generate],
            suppress_health_check=list(HealthCheck),
        )
        @given(strategy)
        def collect(case):
            seen.append(case)

        collect()
    return seen


def assert_reaches(strategy: st.SearchStrategy, corners: list[Callable[[Any], bool]]) -> list:
    """Assert that the strategy draws each corner case at least 5 times, within a limited number of draws."""
    seen: list = []
    while not all(sum(map(corner, seen)) >= 5 for corner in corners):
        assert len(seen) < 10_000, [sum(map(corner, seen)) for corner in corners]
        seen += census(strategy, 250, first=len(seen))
    return seen


SHRINKING = (Phase.explicit, Phase.generate, Phase.shrink)  # even if the current profile leaves some out


@pytest.fixture(scope="module")
def decodes() -> list[DecodeCase]:
    return census(strategies.decode_cases(device=CPU), 400)


@pytest.mark.parametrize(("field", "values"), [
    ("content", contents.CONTENTS), ("occupancy", contents.OCCUPANCIES), ("protect", contents.PROTECTIONS),
    ("poison", contents.POISONS), ("layout", layouts.LAYOUTS), ("dtype", strategies.DTYPES),
    ("group", (1, 3, 5, 8, 16)), ("head_dim", (16, 64, 80, 96, 128, 160, 256)), ("slots", (1, 2)),
    ("scale", strategies.SCALES), ("per_head", (False, True)), ("batch", (1, 2, 3)), ("key_value_heads", (1, 2, 3)),
])
def test_every_pathology_is_drawn(decodes, field, values):
    drawn = Counter(getattr(case, field) for case in decodes)
    assert all(drawn[value] for value in values), drawn  # the frequency depends on the version of Hypothesis


def test_sizes_on_the_cpu_stay_within_what_the_interpreter_can_do(decodes):
    for case in decodes:
        assert case.batch * case.key_value_heads <= 3 and case.slots <= 48
    # Sizes that are not a multiple of any block, and scored choices: about 40 % of many cases, 33 to 44 % of 400.
    assert sum(case.slots % 16 != 0 for case in decodes) > 200
    assert sum(case.occupancy == "full" and case.slots > 1 for case in decodes) > 100


@pytest.mark.slow
def test_prompts_and_traces_reach_their_corners():
    assert_reaches(strategies.window_cases(device=CPU), [
        lambda case: case.budget == 0, lambda case: case.budget > case.tokens,
        lambda case: case.observers == case.tokens, lambda case: case.budget < case.observers,
        lambda case: case.kernel_size == 1, lambda case: case.occupancy == "left_padding",
        lambda case: case.occupancy == "empty_row", lambda case: case.protect != "none",
        lambda case: case.observers > 16,
    ])
    traces = assert_reaches(strategies.state_traces("longflow", device=CPU), [
        lambda trace: trace.options["budget"] == 1, lambda trace: trace.options["per_head"],
        lambda trace: trace.options["sinks"] > 0, lambda trace: not trace.options["protect_newest"],
        lambda trace: not trace.prompt, lambda trace: trace.padding == "left_padding",
        lambda trace: trace.prompt > trace.options["budget"],
        lambda trace: 0 < trace.prompt < trace.options["budget"],
        lambda trace: trace.steps > trace.options["budget"],
    ])
    for trace in traces:
        longflow.LongFlowConfig(**trace.options)


def test_on_a_gpu_a_dozen_specialisations_and_large_sizes_are_drawn(monkeypatch):
    monkeypatch.setattr(draws, "_profile", lambda: "default")
    drawn = census(strategies.decode_cases(device="cuda"), 300)
    triples = {(case.head_dim, case.group, case.dtype) for case in drawn}
    assert triples == set(strategies.TRIPLES) and len(strategies.TRIPLES) <= 12
    assert max(case.slots for case in drawn) > 2000 and min(case.slots for case in drawn) == 1
    traces = census(strategies.state_traces("longflow", device="cuda"), 50)
    assert {(trace.head_dim, trace.group, trace.dtype) for trace in traces} <= set(strategies.STATE_TRIPLES)


def test_a_run_with_the_profile_gpu_draws_the_usual_specialisation_and_another(monkeypatch):
    """In some run, each is drawn. Without the usual dtype there is one."""
    monkeypatch.setattr(draws, "_profile", lambda: "gpu")
    for usual in (strategies.TRIPLES, strategies.STATE_TRIPLES):
        found = set()
        for number in range(80):
            monkeypatch.setattr(core, "global_force_seed", number)
            triples = strategies._triples(usual, strategies.DTYPES)
            assert len(triples) == 2 and strategies.USUAL in triples
            assert triples == strategies._triples(usual, strategies.DTYPES)
            assert len(strategies._triples(usual, (torch.float32,), others=0)) == 1
            assert strategies._triples(usual, strategies.DTYPES, others=0) == [strategies.USUAL]
            with draws.usual_shape():
                assert strategies._triples(usual, strategies.DTYPES) == [strategies.USUAL]
                assert len(strategies._triples(usual, (torch.float32,))) == 1
            found |= set(triples)
        assert found == set(usual)


def test_failing_examples_shrink_to_the_smallest_case():
    smallest = find(
        strategies.decode_cases(device=CPU), lambda case: case.slots >= 7 and case.group >= 3,
        settings=settings(derandomize=True, database=None, max_examples=2000, phases=SHRINKING),
    )
    assert repr(smallest) == "DecodeCase(group=3, poison='zero', slots=7)"
    assert eval(repr(smallest)).query.equal(smallest.query)


# --- contents ------------------------------------------------------------------------------------------------------

DTYPES = pytest.mark.parametrize("dtype", strategies.DTYPES, ids=str)


def logits_of(content: str, dtype: torch.dtype, **shape):
    sizes = {"batch": 2, "key_value_heads": 2, "group": 3, "slots": 40, "head_dim": 80, **shape}
    case = DecodeCase(content=content, dtype=dtype, **sizes)
    for tensor in (case.query, case.key, case.value):
        assert bool(tensor.isfinite().all()), content
    return case, case.attention.logit


@DTYPES
@pytest.mark.parametrize("scale", strategies.SCALES)
def test_logits_go_where_they_are_aimed(dtype, scale):
    for content, reach in (("overflow_88", 88), ("extreme_1e4", 5e3)):
        _, logit = logits_of(content, dtype, scale=scale)
        assert bool(logit.amax() > reach) and bool(logit.amin() < -reach), content
    _, logit = logits_of("many_87", dtype, scale=scale)
    assert bool((logit > 80).all()) and bool((logit.logsumexp(-1) > 88.73).all())
    _, logit = logits_of("all_below_104", dtype, scale=scale)
    assert bool((logit < -99).all())


@DTYPES
def test_contents_are_what_they_are_called(dtype):
    case, _ = logits_of("equal_keys", dtype)
    assert bool((case.key == case.key[:, :, :1]).all()) and not bool((case.value == case.value[:, :, :1]).all())
    case, _ = logits_of("identical", dtype)
    assert bool((tie_classes(case.key, case.value, case.occupied) == 0).all())
    case, _ = logits_of("dominant", dtype)
    assert bool((case.attention.weight[:, ::3].amax(-1) > 0.99).all())
    case, _ = logits_of("zero_values", dtype)
    assert 0 < int((case.value == 0).all(-1).sum()) < case.value[..., 0].numel()
    case, _ = logits_of("tiny_values", dtype)
    smallest = torch.finfo(torch.float16 if dtype == torch.float16 else torch.float32).tiny
    assert bool(((case.value != 0) & (case.value.abs() < smallest)).any())
    assert bool((logits_of("zero_query", dtype)[1] == 0).all())


@DTYPES
def test_duplicates_tie_for_the_lowest_score_and_near_ties_are_an_ulp_apart(dtype):
    for per_head in (False, True):
        case, _ = logits_of("duplicates", dtype, per_head=per_head, seed=2)
        tie = tie_classes(case.key, case.value, case.occupied, per_head=per_head)
        victim = longflow.decode_attention(**{k: cases_upcast(v) for k, v in case.inputs.items()}).slot
        members = (tie == tie.gather(-1, victim[..., None])).sum(-1)
        assert bool((members > 5).all()), "the equal tokens must be the next victims, or the tie rule decides nothing"
    case, _ = logits_of("near_ties", dtype, seed=2)
    tie = tie_classes(case.key, case.value, case.occupied)
    low, high = rank_interval(case)
    close = (low[..., :, None] <= high[..., None, :]) & (low[..., None, :] <= high[..., :, None])
    distinct = tie[..., :, None] != tie[..., None, :]
    apart = (case.value[:, :, :, None].double() - case.value[:, :, None].double()).abs()
    assert bool((apart[..., 0][:, 0][distinct] > 0).any())
    if dtype == torch.float32:
        assert bool((close & distinct).any()), "an ulp of float32 must be less than the bound"


def cases_upcast(value):
    return value.double() if isinstance(value, torch.Tensor) and value.is_floating_point() else value


def test_next_up_is_the_next_number():
    for dtype in strategies.DTYPES:
        one = torch.ones(3, dtype=dtype)
        assert bool((contents.next_up(one) == 1 + torch.finfo(dtype).eps).all())
        assert bool((contents.next_up(-one) == -1 - torch.finfo(dtype).eps).all())


@pytest.mark.parametrize("kind", contents.POISONS)
def test_unoccupied_slots_are_poisoned_and_occupied_ones_are_not(kind):
    case = DecodeCase(batch=2, slots=9, occupancy="random", poison=kind, seed=3)
    plain = DecodeCase(batch=2, slots=9, occupancy="random", poison="stale", seed=3)
    free = ~case.occupied[:, None, :, None].expand(case.key.shape)
    assert bool(free.any()) and torch.equal(case.key[~free], plain.key[~free])
    fills = {"zero": 0.0, "inf": math.inf, "largest": torch.finfo(torch.float32).max}
    if kind in fills:
        assert bool((case.value[free] == fills[kind]).all())
    elif kind == "nan":
        assert bool(case.value[free].isnan().all())


def test_masks_are_what_they_are_called():
    generator = torch.Generator().manual_seed(0)
    full, padded, one, hole, empty = (
        contents.occupancy(kind, generator, (3, 8)) for kind in
        ("full", "left_padding", "one_token", "one_free", "empty_row")
    )
    assert bool(full.all()) and bool((padded == padded.sort(-1).values).all()) and bool(padded.any(-1).all())
    assert one.sum(-1).tolist() == [1, 1, 1] and hole.sum(-1).tolist() == [7, 7, 7]
    assert empty.any(-1).tolist() == [True, True, False]
    assert contents.protection("none", generator, (3, 8)) is None
    assert contents.protection("all_but_one", generator, (3, 8)).sum(-1).tolist() == [7, 7, 7]


# --- layouts -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("layout", [name for name in layouts.LAYOUTS if name not in layouts.REPEATED])
@pytest.mark.parametrize("shape", [(2, 3, 5, 4), (1, 1, 2, 4), (1, 1, 1, 4), (2, 3, 4), (2, 5)])
def test_a_layout_holds_the_same_numbers(layout, shape):
    tensor = torch.arange(math.prod(shape)).view(shape).to(torch.float16)
    placed = layouts.lay_out(tensor, layout)
    assert torch.equal(placed, tensor)
    if layout in ("sliced", "spread", "far") and len(shape) == 4 and shape[2] > 1:
        assert not placed.is_contiguous()
    if layout == "far" and max(shape[:-1]) > 1 and len(shape) == 4:
        last = sum((size - 1) * stride for size, stride in zip(shape, placed.stride(), strict=True))
        assert last > 2**31


@pytest.mark.parametrize(("layout", "axis"), layouts.REPEATED.items())
def test_a_repeated_axis_has_stride_zero(layout, axis):
    case = DecodeCase(batch=2, key_value_heads=2, slots=5, layout=layout, occupancy="random")
    for tensor in (case.key, case.value):
        assert tensor.stride(axis) == 0 and tensor.shape == (2, 2, 5, 16) and bool(tensor.isfinite().all())


def test_far_offsets_cost_no_memory():
    """Keys and values take 4 GB of address space each."""
    def resident() -> int:
        return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()

    before = resident()
    case = DecodeCase(batch=2, slots=3, dtype=torch.float16, layout="far")
    assert case.key.stride(0) > 2**31 and case.value.stride(0) > 2**31 and bool(case.key.isfinite().all())
    assert resident() - before < 100e6


# --- files ---------------------------------------------------------------------------------------------------------

SAVED = (
    DecodeCase(batch=2, slots=6, layout="transposed", occupancy="random", protect="random", dtype=torch.bfloat16),
    DecodeCase(batch=2, key_value_heads=2, slots=6, layout="repeat_heads", per_head=True, scale=0.5),
    WindowCase(tokens=9, observers=3, budget=4, occupancy="left_padding", dtype=torch.float16),
    StateTrace(batch=2, config=(("budget", 4), ("sinks", 1)), prompt=7, padding="left_padding", steps=3),
)


@pytest.mark.parametrize("case", SAVED, ids=lambda case: case.kind)
def test_a_saved_case_comes_back_whole_and_replays(case, tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("TRITON_INTERPRET", "1")  # a replay on the CPU would set it permanently
    prepared = []
    monkeypatch.setattr(interpreter, "prepare", lambda: prepared.append(True))  # would import triton
    path = tmp_path / "case.safetensors"
    assert case.save(path) == f"kvtwin replay {path}"
    loaded = saved.load(path)
    assert repr(loaded) == repr(case) and type(loaded) is type(case)
    assert loaded.tensors.keys() == case.tensors.keys()
    for name, tensor in case.tensors.items():
        other = loaded.tensors[name]
        assert (tensor is None) == (other is None)
        if tensor is not None:
            assert tensor.equal(other) or bool(tensor.isnan().any())
            assert tensor.stride() == other.stride() and tensor.dtype == other.dtype
    with stats.collect():
        assert main([str(path), "--impl", "kvtwin.reference", "--device", "cpu"]) == 0
    assert "right" in capsys.readouterr().out
    assert prepared, "a replay on the CPU must use the arithmetic of the run that saved the case"


def test_a_case_that_holds_one_tensor_twice_is_saved_too(tmp_path):
    """safetensors refuses tensors that share memory, and its error would hide the mismatch."""
    key = torch.randn(1, 1, 4, 2, generator=torch.Generator().manual_seed(0))
    WindowCase.of(key[:, :, 2:], key, key, budget=2).save(tmp_path / "case.safetensors")
    loaded = saved.load(tmp_path / "case.safetensors")
    assert all(loaded.tensor(name).equal(key) for name in ("key", "value"))


def test_a_failure_saves_the_case_it_is_about_and_says_how_to_replay_it(tmp_path, monkeypatch):
    monkeypatch.setenv("KVTWIN_FAILURES", str(tmp_path / "kept"))

    @settings(
        derandomize=True, database=None, max_examples=200, deadline=None, print_blob=False, phases=SHRINKING
    )
    @given(strategies.decode_cases(device=CPU, occupancy=("full",), protect=("none",)))
    def picks_too_high_a_slot(case):
        right = longflow.decode_attention(**case.inputs)
        assert_slot_right(right.slot + (case.slots > 4), case)

    with pytest.raises(Mismatch, match=r"replay: kvtwin replay .*kept") as caught:
        picks_too_high_a_slot()
    (file,) = (tmp_path / "kept").iterdir()
    assert str(file) in str(caught.value)
    smallest = saved.load(file)
    assert smallest.slots == 5 and smallest.batch == 1, "the smallest example must be saved"


def test_a_case_of_an_earlier_test_is_not_blamed():
    case = DecodeCase()
    assert case.inputs and cases.latest() is case
    cases._latest[:] = [(case, "another test")]
    assert cases.latest() is None
