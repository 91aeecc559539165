"""Tests of the judge: bounds of `attend` over FP8 keys and values are sound and tight.

As test_judge_fp8.py, with the arithmetic of emulate.py.
"""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch
from torch import Tensor

from kvtwin.conformance import discovery
from kvtwin.conformance.cases.block_cases import AttendCase
from kvtwin.conformance.cases.fp8_cases import FORMATS, OWN_CONTENTS, POISONS, Fp8AttendCase, exact
from kvtwin.conformance.cases.saved import load
from kvtwin.conformance.judge import bounds, checkers
from kvtwin.conformance.judge.checkers import blocks
from kvtwin.conformance.judge.compare import Mismatch, assert_within
from kvtwin.conformance.tool.emulate import Machine
from kvtwin.reference.attention import per_query_head, zero_unoccupied

#: The pairs with an `attend`, by name.
ATTENDS = {pair.name: pair for pair in discovery.methods() if Fp8AttendCase in checkers.ask(pair.name, "CASES", ())}
TOVA = checkers.checker_of("tova")  # None if there is no such method
FULL = (Machine("sequential", lean=-1), Machine("reversed", fused=True, lean=1, block=16, logs=True))
HALF = Machine("sequential", truncates=True, lean=1, block=16, flushes=True)
MACHINES = [(torch.float32, machine) for machine in FULL] + [
    (dtype, dataclasses.replace(HALF, weight_dtype=dtype)) for dtype in (torch.float16, torch.bfloat16)
]
each_format = pytest.mark.parametrize("fp8", FORMATS)
first_or_last = pytest.mark.parametrize("first", [True, False], ids=["scaled_numbers", "scaled_results"])


@pytest.fixture(autouse=True)
def keep_failures_out_of_the_tree(tmp_path, monkeypatch):
    monkeypatch.setenv("KVTWIN_FAILURES", str(tmp_path))


def computed(machine: Machine, case: Fp8AttendCase, first: bool) -> tuple[Tensor, Tensor]:
    """Output [B, Hq, Q, D] and weights [B, Hq, Q, S] of `attend`, as a machine computes them. first: it multiplies keys
    and values by their scales, and not logits and outputs."""
    tensors, factors = [], []
    for codes, scale in ((case.key, case.key_scale), (case.value, case.value_scale)):
        number = zero_unoccupied(codes.float(), case.occupied)
        if scale is not None and first:
            number, scale = machine.times(number, scale.view(1, -1, 1, 1).expand_as(number)), None
        tensors.append(per_query_head(number, case.query_heads)[:, :, None])               # [B, Hq, 1, S, D]
        heads = None if scale is None else scale.expand(case.key_value_heads).repeat_interleave(case.group)
        factors.append(None if heads is None else heads[:, None, None])                    # [Hq, 1, 1]
    query = case.query.masked_fill(~case.valid.repeat_interleave(case.group, 1)[..., None], 0)
    logit = machine.logits(query, tensors[0], case.attention.seen, case.factor, factors[0])
    row_max, total, acc = machine.softmax(logit, tensors[1])
    output = machine.quotient(acc, total)
    output = output if factors[1] is None else machine.times(output, factors[1])
    weight = machine.exp2(logit - (row_max + machine.log2(total))[..., None]).masked_fill(~case.attention.seen, 0)
    return output.to(case.dtype), weight


def received(machine: Machine, weight: Tensor, heads: int) -> Tensor:
    """The sum over queries of the mean over the group, [B, Hkv, S]."""
    per_head = machine.sum(weight.transpose(2, 3)).unflatten(1, (heads, -1))              # [B, Hkv, G, S]
    return machine.sum(per_head.transpose(2, 3)) / per_head.shape[2]


def utilisation(machine: Machine, case: Fp8AttendCase, first: bool) -> dict[str, float]:
    """The largest error of `machine`, relative to its bound. Raises Mismatch if an error exceeds its bound."""
    attention, allowed = case.attention, bounds.arithmetic(case.dtype, weight_dtype=machine.weight_dtype)
    output, weight = computed(machine, case, first)
    heads = case.key_value_heads
    used = {
        "output": assert_within(output, attention.output, bounds.output_error(attention, allowed), what="output"),
        "received": assert_within(
            received(machine, weight, heads), blocks.received_attention(attention),
            blocks.received_error(attention, allowed), what="received",
        ),
    }
    if TOVA is not None:
        newest = TOVA.newest(attention, case.valid)
        last = (attention.logit == newest.logit).all(-1).to(torch.int8).argmax(2)[..., None, None]
        one = weight.gather(2, last.expand(-1, -1, 1, weight.shape[-1]))
        used["newest"] = assert_within(
            received(machine, one, heads), blocks.received_attention(newest), TOVA.weight_error(newest, allowed),
            what="newest")
    return used


@first_or_last
@each_format
@pytest.mark.parametrize("content", [
    "ordinary", "overflow_88", *(pytest.param(own, marks=pytest.mark.slow) for own in OWN_CONTENTS),
])
@pytest.mark.parametrize(("dtype", "machine"), MACHINES, ids=str)
def test_no_correct_arithmetic_exceeds_the_bounds_of_attend(dtype, machine, content, fp8, first):
    for scales, queries in (("heads", 3), ("tensor", 1)):
        utilisation(machine, Fp8AttendCase(
            batch=2, key_value_heads=2, group=2, slots=17, queries=queries, occupancy="random", dtype=dtype, fp8=fp8,
            content=content, scales=scales, seed=3,
        ), first)


@first_or_last
@each_format
@pytest.mark.parametrize("machine", FULL, ids=str)
def test_ordinary_fp8_reaches_one_percent_of_each_bound_of_attend(machine, fp8, first):
    """For D = 16, S <= 16 and float32."""
    worst: dict[str, float] = {}
    for group, slots, queries in ((1, 4, 1), (1, 16, 4), (2, 8, 8), (4, 16, 1)):
        case = Fp8AttendCase(batch=64, group=group, slots=slots, queries=queries, seed=1, fp8=fp8)
        worst = {name: max(used, worst.get(name, 0)) for name, used in utilisation(machine, case, first).items()}
    assert all(0.01 <= used <= 1 for used in worst.values()), worst


def test_a_scale_widens_the_bounds_of_attend_by_one_rounding():
    """Compared with the same numbers in float32. What a key receives has an error of its logit, and of all others."""
    case = Fp8AttendCase(batch=4, key_value_heads=2, slots=12, queries=4, scales="powers", seed=2, poison="zero")
    numbers = {name: exact(getattr(case, name), getattr(case, f"{name}_scale")).float() for name in ("key", "value")}
    plain = AttendCase(batch=4, key_value_heads=2, slots=12, queries=4)
    plain._adopt({"query": case.query, "occupied": case.occupied, **numbers})
    allowed = bounds.arithmetic(torch.float32)
    for bound in (bounds.output_error, blocks.received_error):
        ratio = bound(case.attention, allowed) / bound(plain.attention, allowed)
        assert bool((ratio >= 1).all())
        assert float(ratio.max()) <= (16 + 3) / (16 + 2)


@each_format
@pytest.mark.parametrize("name", ATTENDS)
def test_wrong_scales_are_caught(name, fp8):
    """Without a scale, with that of another head, and scaled keys and values that are rounded to 16 bits."""
    judge, attend = checkers.checker_of(name), ATTENDS[name].reference.attend
    case = Fp8AttendCase(
        batch=2, key_value_heads=2, group=2, slots=20, queries=3, fp8=fp8, dtype=torch.bfloat16, content="codes",
        method=name, seed=308,
    )
    scales = {"key_scale": case.key_scale, "value_scale": case.value_scale}

    def judged(**changes: Tensor | None) -> None:
        class Wrong:
            @staticmethod
            def attend(**inputs):
                output, given = attend(**inputs | changes)
                return output, given

        assert list(judge.replay(case, Wrong)) == ["attend: right"]

    judged()
    for scale, says in (("key_scale", "received|output"), ("value_scale", "output")):
        for wrong in (None, scales[scale].flip(0), scales[scale] * (1 + 2.0**-6)):
            with pytest.raises(Mismatch, match=says):
                judged(**{scale: wrong})
    rounded = {part: exact(getattr(case, part), scales[f"{part}_scale"]).bfloat16() for part in ("key", "value")}
    with pytest.raises(Mismatch, match="received"):
        judged(**rounded, key_scale=None, value_scale=None)


@each_format
def test_poison_is_in_free_slots_and_in_queries_of_padding(fp8):
    for poison, code in POISONS[fp8].items():
        case = Fp8AttendCase(
            batch=2, key_value_heads=2, slots=24, queries=8, fp8=fp8, poison=poison, occupancy="random", per_head=True
        )
        free, padding = ~case.occupied, ~case.occupied.any(1)[:, 16:]
        for codes in (case.key, case.value):
            assert bool((codes.view(torch.uint8)[free] == code).all())
        query = case.query.transpose(1, 2)
        assert bool(padding.any()) and bool(query[~padding].isfinite().all())
        if poison in ("nan", "inf"):
            assert not bool(query[padding].isfinite().any())


def test_a_saved_case_of_attend_is_the_same_again(tmp_path):
    case = Fp8AttendCase(batch=2, key_value_heads=2, slots=7, queries=2, fp8="e5m2", layout="spread", method="tova")
    case.save(tmp_path / "case.safetensors")
    again = load(tmp_path / "case.safetensors")
    assert again == case and type(again) is Fp8AttendCase
    for name, tensor in case.tensors.items():
        assert tensor.stride() == again.tensors[name].stride(), name
        assert torch.equal(tensor.double().nan_to_num(), again.tensors[name].double().nan_to_num()), name
    assert not math.isnan(float(case.attention.output.sum()))
