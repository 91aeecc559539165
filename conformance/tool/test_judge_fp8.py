"""Tests of the judge: bounds over FP8 keys and values are sound and tight, and its cases hold what they should.

emulate.py has the arithmetic. All data is seeded; nothing is drawn.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest
import torch

from kvtwin.conformance.cases import fp8_cases, oracle
from kvtwin.conformance.cases.case import DecodeCase
from kvtwin.conformance.cases.fp8_cases import FORMATS, LARGEST, NORMAL, Fp8Case, exact
from kvtwin.conformance.cases.saved import load
from kvtwin.conformance.judge import bounds
from kvtwin.conformance.judge.checkers import longflow as judge
from kvtwin.conformance.judge.compare import Mismatch, assert_within
from kvtwin.conformance.judge.ties import tie_classes
from kvtwin.conformance.tool.emulate import Machine
from kvtwin.reference.longflow import decode_attention, log_score


@pytest.fixture(autouse=True)
def keep_failures_out_of_the_tree(tmp_path, monkeypatch):
    monkeypatch.setenv("KVTWIN_FAILURES", str(tmp_path))


FULL = (Machine("sequential", lean=-1), Machine("reversed", fused=True, lean=1, block=16, logs=True))
HALF = Machine("sequential", truncates=True, lean=1, block=16, flushes=True)
MACHINES = [(torch.float32, machine) for machine in FULL] + [
    (dtype, dataclasses.replace(HALF, weight_dtype=dtype)) for dtype in (torch.float16, torch.bfloat16)
]
each_format = pytest.mark.parametrize("fp8", FORMATS)
first_or_last = pytest.mark.parametrize("first", [True, False], ids=["scaled_numbers", "scaled_results"])


def utilisation(machine: Machine, case: Fp8Case, first: bool) -> dict[str, float]:
    """The largest error of `machine`, relative to its bound. first: it multiplies keys and values by their scales, and
    not logits, outputs and norms. Raises Mismatch if an error exceeds its bound."""
    scales: dict[str, Any] = {"key_scale": case.key_scale, "value_scale": case.value_scale}
    tensors = [case.key.float(), case.value.float()]
    if first:
        tensors = [
            number if scale is None else number * scale.view(1, -1, 1, 1)
            for number, scale in zip(tensors, scales.values(), strict=True)
        ]
        scales = {}
    got = machine.decode(case.query, *tensors, case.occupied, scale=case.factor, per_head=case.per_head, **scales)
    allowed = bounds.arithmetic(case.dtype, weight_dtype=machine.weight_dtype)
    truth, numbers = oracle.oracle(decode_attention, case), oracle.upcast_all(case.exact_inputs)
    logs = log_score(
        *(numbers[name] for name in ("query", "key", "value", "occupied")), scale=case.factor, per_head=case.per_head
    )
    low, high = judge.rank_interval(case, allowed)
    half = torch.maximum(high - logs, logs - low).masked_fill(logs.isinf(), 0)
    return {
        "output": assert_within(got.output, truth.output, bounds.decode_output(case, allowed), what="output"),
        "score": assert_within(got.score, truth.score, judge.score_bound(case, allowed), what="score"),
        "log score": assert_within(got.log_score, logs, half, what="log score"),
    }


@first_or_last
@each_format
@pytest.mark.parametrize("content", ["ordinary", "codes", "largest", "overflow_88", "subnormal"])
@pytest.mark.parametrize(("dtype", "machine"), MACHINES, ids=str)
def test_no_correct_arithmetic_exceeds_the_bounds_over_fp8(dtype, machine, content, fp8, first):
    for scales in ("heads", "tensor", "none"):
        case = Fp8Case(
            batch=2, key_value_heads=2, group=2, head_dim=24, slots=19, occupancy="random", dtype=dtype, fp8=fp8,
            content=content, scales=scales, seed=3,
        )
        utilisation(machine, case, first)


@first_or_last
@each_format
@pytest.mark.parametrize("machine", FULL, ids=str)
def test_ordinary_fp8_reaches_one_percent_of_each_bound(machine, fp8, first):
    """For D = 16, S <= 16 and float32."""
    worst: dict[str, float] = {}
    for group, slots in ((1, 4), (2, 8), (4, 16)):
        found = utilisation(machine, Fp8Case(batch=128, group=group, slots=slots, seed=1, fp8=fp8), first)
        worst = {name: max(used, worst.get(name, 0)) for name, used in found.items()}
    assert min(worst.values()) >= 0.01, worst


def test_a_scale_widens_bounds_by_one_rounding():
    """Compared with the same numbers in float32."""
    case = Fp8Case(batch=4, key_value_heads=2, slots=12, scales="powers", seed=2, poison="zero")
    numbers = [exact(case.key, case.key_scale).float(), exact(case.value, case.value_scale).float()]
    plain = DecodeCase.of(case.query, *numbers, case.occupied)
    for bound in (bounds.decode_output, judge.score_bound):
        ratio = bound(case) / bound(plain)
        assert bool((ratio >= 1).all())
        assert float(ratio.max()) <= (16 + 3) / (16 + 2)


@each_format
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_scaled_keys_and_values_must_not_be_rounded_to_16_bits(dtype, fp8):
    """The scores show it; the output, rounded to 16 bits itself, may not."""
    case = Fp8Case(batch=2, key_value_heads=2, group=2, slots=30, dtype=dtype, fp8=fp8, content="codes")
    inputs = dict(case.inputs)
    for name in ("key", "value"):
        inputs[name] = exact(inputs[name], inputs.pop(f"{name}_scale")).to(dtype)
    with pytest.raises(Mismatch, match="score"):
        judge.assert_decode_right(decode_attention(**inputs), case)
    judge.assert_decode_right(decode_attention(**case.inputs), case)


# What cases hold -----------------------------------------------------------------------------------------------------


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(torch.uint8)


@each_format
@pytest.mark.parametrize("content", fp8_cases.CONTENTS)
def test_cases_hold_finite_numbers(fp8, content):
    for scales in fp8_cases.SCALES:
        case = Fp8Case(
            batch=2, key_value_heads=2, group=2, slots=20, fp8=fp8, content=content, scales=scales, dtype=torch.float16
        )
        for tensor, scale in ((case.key, case.key_scale), (case.value, case.value_scale)):
            assert tensor.dtype == FORMATS[fp8]
            assert bool(tensor.double().isfinite().all())
            number = exact(tensor, scale)
            small = number.abs() < 2.0**-126
            assert bool((number[small] == 0).all()), "scaled numbers must be normal float32 numbers"
            assert scale is None or bool((scale > 0).all())
        assert float(case.attention.output.abs().max()) < torch.finfo(torch.float16).max


@each_format
def test_codes_of_all_kinds_are_drawn(fp8):
    """All finite ones; subnormal numbers and zeros of both signs alone; the largest numbers alone."""
    def held(content: str) -> set[int]:
        case = Fp8Case(batch=2, key_value_heads=2, slots=40, head_dim=64, fp8=fp8, content=content)
        return set(bits(case.key).flatten().tolist()) | set(bits(case.value).flatten().tolist())

    assert held("codes") == {code for code in range(256) if code & 0x7F <= LARGEST[fp8]}
    assert held("subnormal") == {code for code in range(256) if code & 0x7F < NORMAL[fp8]}
    assert held("largest") == {code for code in range(256) if LARGEST[fp8] - 2 <= code & 0x7F <= LARGEST[fp8]}


@each_format
def test_contents_keep_their_meaning(fp8):
    def made(content: str, **more: Any) -> Fp8Case:
        return Fp8Case(**{"batch": 2, "slots": 24, "fp8": fp8, "content": content, **more})

    ties = {name: tie_classes(case.key, case.value, case.occupied) for name in ("duplicates", "near_ties", "identical")
            if (case := made(name))}
    index = torch.arange(24)
    assert int((ties["duplicates"] != index).sum()) >= 8
    assert bool((ties["near_ties"] == index).all())
    assert bool((ties["identical"] == 0).all())
    near, copies = made("near_ties"), made("duplicates")
    apart = torch.cat((bits(near.key) != bits(copies.key), bits(near.value) != bits(copies.value)), -1).sum((1, 3))
    assert apart.unique().tolist() == [0, 1], "near ties differ from copies in one code"
    assert bool((bits(made("equal_keys").key) == bits(made("equal_keys").key)[:, :, :1]).all())
    assert int((made("zero_values").value.double() == 0).all(-1).sum()) >= 7 * 2
    largest = [float(made("overflow_88", scales=scales, seed=seed).attention.logit.abs().max())
               for scales in ("heads", "tensor", "powers") for seed in range(4)]
    assert max(largest) > 88


@each_format
def test_poison_is_in_free_slots(fp8):
    for poison, code in fp8_cases.POISONS[fp8].items():
        case = Fp8Case(batch=2, slots=24, fp8=fp8, poison=poison, occupancy="random")
        free = ~case.occupied[:, None].expand(-1, 1, -1)
        assert bool((bits(case.key)[free] == code).all()) and bool((bits(case.value)[free] == code).all())
        number = float(torch.tensor(code, dtype=torch.uint8).view(FORMATS[fp8]).double())
        fits = {"zero": number == 0, "largest": number == torch.finfo(FORMATS[fp8]).max, "nan": math.isnan(number),
                "inf": number == (-math.inf if fp8 == "e5m2" else number) or math.isnan(number)}
        assert fits[poison]


def test_a_saved_case_is_the_same_again(tmp_path):
    case = Fp8Case(batch=2, key_value_heads=2, slots=7, fp8="e5m2", scales="heads_and_tensor", layout="spread", seed=5)
    path = tmp_path / "case.safetensors"
    case.save(path)
    again = load(path)
    assert again == case
    for name, tensor in case.tensors.items():
        other = again.tensors[name]
        assert (tensor is None) == (other is None)
        if tensor is not None:
            assert tensor.stride() == other.stride(), name
            assert torch.equal(bits(tensor.reshape(-1)), bits(other.reshape(-1))), name
