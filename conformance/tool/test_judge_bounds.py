"""Tests of the judge: its bounds are sound (no correct arithmetic exceeds them) and tight (some arithmetic comes near).

emulate.py has the arithmetic: float32 in many orders, fused, truncating, and with exponentials that have the largest
error that their specification allows. All data is seeded; nothing is drawn.
"""

from __future__ import annotations

import dataclasses
import itertools
import math

import pytest
import torch
from torch import Tensor

from kvtwin.conformance.cases import contents, oracle
from kvtwin.conformance.cases.case import DecodeCase, WindowCase
from kvtwin.conformance.judge import bounds
from kvtwin.conformance.judge.checkers import longflow as longflow_judge
from kvtwin.conformance.judge.checkers import snapkv as snapkv_judge
from kvtwin.conformance.judge.compare import JudgeError, Mismatch, assert_within
from kvtwin.conformance.tool.emulate import Computed, Machine
from kvtwin.reference.attention import causal_attention, per_query_head
from kvtwin.reference.baselines import snapkv
from kvtwin.reference.longflow import decode_attention, log_score


@pytest.fixture(autouse=True)
def keep_failures_out_of_the_tree(tmp_path, monkeypatch):
    monkeypatch.setenv("KVTWIN_FAILURES", str(tmp_path))


FULL = (
    Machine("sequential", lean=-1), Machine("reversed", fused=True, lean=1, block=16, logs=True),
    Machine("pairwise", lean=-1, block=16, flushes=True), Machine("strided", lean=1, block=16, logs=True),
)
HALF = (
    Machine("sequential", truncates=True, lean=1, block=16, flushes=True), Machine("pairwise", lean=-1, logs=True),
)
MACHINES = {
    torch.float32: FULL,
    **{
        dtype: tuple(dataclasses.replace(machine, weight_dtype=dtype) for machine in HALF)
        for dtype in (torch.float16, torch.bfloat16)
    },
}
MACHINE_CASES = [(dtype, machine) for dtype, machines in MACHINES.items() for machine in machines]


def allowed_for(machine: Machine, dtype: torch.dtype) -> bounds.Arithmetic:
    return bounds.arithmetic(dtype, weight_dtype=machine.weight_dtype)


def utilisation(machine: Machine, case: DecodeCase) -> dict[str, float]:
    """The largest error of `machine` for `case`, relative to its bound. Raises Mismatch if an error exceeds its
    bound."""
    allowed = allowed_for(machine, case.dtype)
    inputs = (case.query, case.key, case.value, case.occupied)
    got: Computed = machine.decode(*inputs, scale=case.factor, per_head=case.per_head)
    truth = oracle.oracle(decode_attention, case)
    logs = log_score(*map(oracle.upcast, inputs), scale=case.factor, per_head=case.per_head)
    low, high = longflow_judge.rank_interval(case, allowed)
    half = torch.maximum(high - logs, logs - low).masked_fill(logs.isinf(), 0)
    return {
        "output": assert_within(got.output, truth.output, bounds.decode_output(case, allowed), what="output"),
        "score": assert_within(got.score, truth.score, longflow_judge.score_bound(case, allowed), what="score"),
        "log score": assert_within(got.log_score, logs, half, what="log score"),
    }


def window_utilisation(machine: Machine, case: WindowCase, shared_heads: bool) -> float:
    mask, prefix = case.mask, case.tokens - case.observers
    got = machine.window_score(
        case.query_window, case.key, mask, scale=case.factor, kernel_size=case.kernel_size, shared_heads=shared_heads
    )
    inputs = {name: oracle.upcast(value) for name, value in case.score_inputs.items()}
    truth = snapkv.window_score(**inputs, shared_heads=shared_heads)[..., :prefix]
    bound = snapkv_judge.score_bound(case, shared_heads=shared_heads, allowed=allowed_for(machine, case.dtype))
    finite = truth.isfinite()
    return assert_within(got[finite], truth[finite], bound[..., :prefix][finite], what="window score")


def causal_utilisation(machine: Machine, case: WindowCase) -> float:
    query, key, value, mask = case.query_window, case.key, case.value, case.mask
    got = machine.causal(query, key, value, mask, scale=case.factor)
    truth = causal_attention(*map(oracle.upcast, (query, key, value)), mask, scale=case.factor)
    allowed = allowed_for(machine, case.dtype)
    bound = bounds.causal_output(query, key, value, mask, scale=case.scale, allowed=allowed)
    return assert_within(got, truth, bound, what="causal output")


@pytest.mark.slow
@pytest.mark.parametrize("content", contents.CONTENTS)
@pytest.mark.parametrize(("dtype", "machine"), MACHINE_CASES, ids=str)
def test_no_correct_arithmetic_exceeds_the_bounds_of_a_step(dtype, machine, content):
    shapes = (
        {"slots": 16}, {"slots": 37, "group": 3, "key_value_heads": 2, "per_head": True, "occupancy": "random"},
        {"slots": 24, "group": 2, "key_value_heads": 2, "scale": 1.0}, {"slots": 1, "occupancy": "empty_row"},
    )
    for shape in shapes:
        case = DecodeCase(batch=2, head_dim=24, dtype=dtype, content=content, seed=3, **shape)
        utilisation(machine, case)


@pytest.mark.parametrize("content", ["ordinary", "overflow_88", "extreme_1e4", "integers", "equal_keys"])
@pytest.mark.parametrize(("dtype", "machine"), MACHINE_CASES, ids=str)
def test_no_correct_arithmetic_exceeds_the_bounds_of_a_prompt(dtype, machine, content):
    case = WindowCase(
        batch=2, key_value_heads=2, group=2, head_dim=16, dtype=dtype, content=content, tokens=20, observers=6,
        occupancy="left_padding", seed=4,
    )
    for shared_heads in (False, True):
        window_utilisation(machine, case, shared_heads)
    causal_utilisation(machine, dataclasses.replace(case, observers=20))


def test_a_softmax_that_rescales_at_every_slot_needs_smaller_blocks_in_its_bound():
    """`block` is an assumption about the kernel. The bound for blocks of one slot covers rescaling at every slot."""
    case = DecodeCase(batch=64, slots=64, content="ordinary")
    machine = Machine(block=1, lean=1)
    got = machine.decode(case.query, case.key, case.value, case.occupied, scale=case.factor)
    truth = oracle.oracle(decode_attention, case)
    by_block = {block: bounds.decode_output(case, bounds.arithmetic(case.dtype, block=block)) for block in (1, 16)}
    assert_within(got.output, truth.output, by_block[1], what="output")
    assert bool((by_block[1] > by_block[16]).all())


@pytest.mark.parametrize("scale", [0.02, -0.5, 30.0])
@pytest.mark.parametrize(("dtype", "machine"), MACHINE_CASES, ids=str)
def test_softcapped_logits(dtype, machine, scale):
    """Sound, tight, and no room for a hardware's tanh, which is off by 2^-11 (PTX tanh.approx)."""
    case, cap, base_2 = DecodeCase(batch=64, slots=16, dtype=dtype, scale=scale, seed=5), 2.0, math.log2(math.e)
    given = case.query, case.key, case.value, case.occupied
    exact = oracle.attend(*given, scale=scale, softcap=cap)
    bound = bounds.logit_error(exact, allowed_for(machine, dtype))
    keys = per_query_head(case.key, case.query.shape[1]).float()
    ratio = machine.logits(case.query, keys, exact.seen[:, :, 0], scale / cap / base_2)
    shrunk = machine.exp2((-2 * ratio.abs() * base_2).float())
    for off in (0.0, 2.0**-11):
        tanh = torch.where(ratio.abs() < 0.5, ratio.tanh(), ratio.sign() * (1 - shrunk) / (1 + shrunk)) * (1 + off)
        got = (tanh * torch.tensor(cap * base_2)).double() / base_2
        if off and dtype == torch.float32:
            with pytest.raises(Mismatch, match="logit"):
                assert_within(got[:, :, None], exact.logit, bound, what="logit")
        elif not off:
            used = assert_within(got[:, :, None], exact.logit, bound, what="logit")
            assert used >= 0.01


@pytest.mark.parametrize(("dtype", "machine"), MACHINE_CASES, ids=str)
def test_attention_sinks(dtype, machine):
    """Sound and tight with a sink that takes nothing, a share, or nearly everything."""
    case = DecodeCase(batch=64, slots=16, group=3, dtype=dtype, seed=6)
    sinks = torch.tensor([-30.0, 0.5, 12.0])
    exact = oracle.attend(case.query, case.key, case.value, case.occupied, sink_logits=sinks)
    keys, values = (per_query_head(tensor, 3).float() for tensor in (case.key, case.value))
    logit = machine.logits(case.query, keys, exact.seen[:, :, 0], case.factor)
    first = (sinks * math.log2(math.e)).view(1, 3, 1).expand(64, 3, 1)
    _, total, acc = machine.softmax(torch.cat([first, logit], -1), torch.nn.functional.pad(values, (0, 0, 1, 0)))
    got = machine.quotient(acc, total).to(dtype)[:, :, None]
    assert assert_within(got, exact.output, bounds.output_error(exact, allowed_for(machine, dtype)), what="o") >= 0.01


# --- tight: on ordinary data ---------------------------------------------------------------------------------------

SMALL = [(1, 4), (1, 16), (2, 8), (4, 16)]


@pytest.mark.parametrize("machine", FULL, ids=str)
def test_ordinary_data_reaches_one_percent_of_each_bound(machine):
    """For D = 16, S <= 16 and float32, the worst of a few thousand elements of ordinary data uses at least 1 %."""
    worst: dict[str, float] = {}
    for group, slots in SMALL:
        found = utilisation(machine, DecodeCase(batch=128, group=group, slots=slots, seed=1))
        worst = {name: max(used, worst.get(name, 0)) for name, used in found.items()}
    case = WindowCase(batch=64, group=2, tokens=16, observers=4, seed=2)
    worst["window score"] = window_utilisation(machine, case, True)
    worst["causal output"] = causal_utilisation(machine, dataclasses.replace(case, observers=16))
    assert all(0.01 <= used <= 1 for used in worst.values()), worst


# --- tight: on data with large errors ------------------------------------------------------------------------------


def erring_keys(slots: int, head_dim: int, dtype: torch.dtype, share: float = 0.5) -> tuple[Tensor, Tensor]:
    """query [D] and key [S, D] whose dot products have the largest error of sequential sums: first 1, and then D - 1
    terms of one sign that are just too small to change 1. A `share` of the slots has only the first term, and no
    error."""
    query = torch.ones(head_dim)
    lost = 2.0**-24 * (1 - 2.0**-8)
    if dtype == torch.float16:
        # Truncation loses up to 2 u. float16 needs subnormal numbers, 15 times 2^-24, and a query of 1/8.
        query[1:], lost = 0.125, 15 * 2.0**-24
    elif dtype == torch.bfloat16:
        lost = 2.0**-23 * (1 - 2.0**-8)
    key = torch.zeros(slots, head_dim)
    key[:, 0] = 1
    key[int(slots * share):, 1:] = lost
    return query.to(dtype), key.to(dtype)


def erring_case(slots: int, head_dim: int, dtype: torch.dtype, *, scale: float = 20.0) -> DecodeCase:
    query, key = erring_keys(slots, head_dim, dtype)
    value = torch.zeros(slots, head_dim, dtype=dtype)
    index = torch.arange(slots)
    value[index, index % head_dim] = 1
    return DecodeCase.of(query[None, None], key[None, None], value[None, None], scale=scale)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_dot_products_made_to_err_reach_ten_percent_at_larger_shapes(dtype):
    """Sequential sums, truncated if tensor cores may truncate, with D = 128, S = 48 and D = 256, S = 24."""
    machine = Machine("sequential", truncates=dtype != torch.float32)
    for slots, head_dim in ((48, 128), (24, 256)):
        found = utilisation(machine, erring_case(slots, head_dim, dtype))
        if dtype != torch.float32:
            del found["output"]  # nearly all of its error is the final rounding, which is at most half an ulp
        assert all(0.1 <= used <= 1 for used in found.values()), (slots, head_dim, found)


def test_values_made_to_err_reach_ten_percent_of_the_output_bound():
    """With equal weights, each later value is just too small to change the sum after the first one, so all are lost."""
    slots = 1024
    value = torch.full((1, 1, slots, 1), 2.0**-24 * (1 - 2.0**-8))
    value[:, :, 0] = 1
    zeros = torch.zeros(1, 1, slots, 16)
    case = DecodeCase.of(torch.zeros(1, 1, 16), zeros, value.expand_as(zeros))
    found = utilisation(Machine("sequential"), case)
    assert 0.1 <= found["output"] <= 1, found


def test_prompts_made_to_err_reach_ten_percent():
    query, key = erring_keys(40, 128, torch.float32)
    key, value = key[None, None], torch.eye(128)[None, None, :40]
    case = WindowCase.of(query.expand(1, 1, 8, 128), key, value, budget=10, kernel_size=3, scale=20.0)
    assert 0.1 <= window_utilisation(Machine("sequential"), case, True) <= 1
    whole = WindowCase.of(query.expand(1, 1, 40, 128), key, value, budget=10, scale=20.0)
    assert 0.1 <= causal_utilisation(Machine("sequential"), whole) <= 1


# --- properties of the bounds --------------------------------------------------------------------------------------


@pytest.mark.parametrize("lean", [-1, 1])
def test_an_exponential_beyond_its_allowance_is_caught(lean):
    """64 times the allowed error. Scores are exponentials of logarithms here; elsewhere a common factor cancels."""
    case = DecodeCase(batch=8, slots=2, content="zero_query", seed=2)

    class Sloppy(Machine):
        def exp2(self, x: Tensor) -> Tensor:
            return super().exp2(x) * (1 + lean * 2.0**-16)

    with pytest.raises(Mismatch, match="score"):
        utilisation(Sloppy(logs=True), case)


def test_bounds_are_zero_where_nothing_can_err_and_finite_everywhere():
    case = DecodeCase(batch=3, slots=9, group=2, key_value_heads=2, occupancy="empty_row", protect="newest")
    output, score = bounds.decode_output(case), longflow_judge.score_bound(case)
    empty = ~case.occupied.any(-1)
    assert bool(empty.any()) and bool((output[empty] == 0).all()) and bool((output[~empty] > 0).all())
    assert bool((score[~case.occupied | case.protected] == 0).all()) and bool((score >= 0).all())
    for content, dtype in itertools.product(contents.CONTENTS, MACHINES):
        case = DecodeCase(batch=2, slots=9, head_dim=256, group=2, content=content, dtype=dtype, scale=1.0)
        assert bool(bounds.decode_output(case).isfinite().all()), (content, dtype)
        low, high = longflow_judge.rank_interval(case)
        assert bool((low <= high).all()), (content, dtype)


def test_what_lies_in_unoccupied_slots_does_not_reach_a_bound():
    plain = DecodeCase(slots=9, occupancy="random", poison="zero", seed=7)
    for kind in ("nan", "inf", "largest"):
        poisoned = dataclasses.replace(plain, poison=kind)
        for bound in (bounds.decode_output, longflow_judge.score_bound):
            assert torch.equal(bound(plain), bound(poisoned))
        for one, other in zip(longflow_judge.rank_interval(plain), longflow_judge.rank_interval(poisoned), strict=True):
            assert torch.equal(one, other)


def test_a_bound_that_is_no_number_is_the_judges_error():
    zero = torch.zeros(2, dtype=torch.float64)
    for bound in (torch.tensor([0.0, float("nan")]), torch.tensor([0.0, -1.0])):
        with pytest.raises(JudgeError):
            assert_within(zero.float(), zero, bound.double())
