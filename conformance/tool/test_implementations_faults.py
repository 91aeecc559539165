"""Planted faults: each is what it says, and in no other call; and the verdict finds those that a CPU can show."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from kvtwin.conformance.harness import verdict
from kvtwin.conformance.lab.implementations import run
from kvtwin.conformance.lab.implementations.faults import FAULTS, Dice, Fast, Fault, misplaced

CPU = torch.device("cpu")


def inputs(*, batch: int = 2, slots: int = 9, dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    """Full caches of two KV heads with random numbers."""
    draw = torch.Generator().manual_seed(slots)
    query, key, value = (torch.randn(batch, *shape, generator=draw).to(dtype) for shape in (
        (4, 16), (2, slots, 16), (2, slots, 16),
    ))
    return {"query": query, "key": key, "value": value, "occupied": torch.ones(batch, slots, dtype=torch.bool)}


def made(name: str, seed: int = 1) -> Any:
    fault = FAULTS[name]
    return getattr(fault.provided(seed), fault.function)


def differing(name: str, given: dict[str, torch.Tensor], calls: int = 1, seed: int = 1) -> dict[str, list[int]]:
    """Of each field, how many elements are wrong in each call."""
    planted, right = made(name, seed), Fast()(**given)
    found: dict[str, list[int]] = {"output": [], "score": [], "slot": []}
    for _ in range(calls):
        for field, actual, expected in zip(found, planted(**given), right, strict=True):
            found[field].append(int((actual != expected).sum()))
    return found


def test_the_dice_have_rates_and_each_call_and_seed_has_its_own():
    dice = Dice(1)
    rolls = torch.stack([dice.roll(1000, CPU) for _ in range(50)])
    assert rolls.min() >= 0 and rolls.max() < 1 and rolls.unique().numel() == rolls.numel()
    for rate in (0.1, 0.01, 0.001):
        expected = rate * rolls.numel()
        assert abs(int((rolls < rate).sum()) - expected) < 5 * expected**0.5
    # Neither along a call, nor from call to call.
    assert abs(torch.corrcoef(torch.stack((rolls[:, :-1].flatten(), rolls[:, 1:].flatten())))[0, 1]) < 0.02
    assert abs(torch.corrcoef(torch.stack((rolls[:-1].flatten(), rolls[1:].flatten())))[0, 1]) < 0.02
    assert torch.equal(Dice(1).roll(1000, CPU), rolls[0])
    assert not torch.equal(Dice(2).roll(1000, CPU), rolls[0])


@pytest.mark.parametrize("rate", [10, 100, 1000])
def test_rates_of_rows_elements_and_launches(rate):
    given = inputs(batch=50)
    calls = 40
    rows = sum(differing(f"row-{rate}", given, calls)["slot"])
    elements = sum(differing(f"element-{rate}", given, calls)["output"])
    launches = sum(differing(f"bits-{rate}", inputs(batch=1, slots=3), 20 * calls)["score"])
    for found, of in ((rows, 50 * calls), (elements, calls * 50 * 4 * 16), (launches, 20 * calls)):
        assert abs(found - of / rate) <= 4 * (of / rate) ** 0.5 + 1, (found, of)


def test_other_bits_are_the_last_bit_of_one_score():
    given = inputs()
    planted, right = made("bits-10"), Fast()(**given)
    scores = [planted(**given).score for _ in range(100)]
    wrong = [score for score in scores if not torch.equal(score, right[1])]
    assert wrong
    for score in wrong:
        ulps = score.view(torch.int32) - right[1].view(torch.int32)
        assert ulps.sum() == 1 and ulps.abs().sum() == 1


@pytest.mark.parametrize(("name", "wrong", "right", "elements"), [
    ("batch", {"batch": 17}, {"batch": 16}, 4 * 16),
    ("slots", {"slots": 2049}, {"slots": 2048}, 2 * 4 * 16),
    ("last-tile", {"slots": 129}, {"slots": 128}, 2 * 4 * 16),
    ("last-tile", {"slots": 300}, {"slots": 100}, 2 * 4 * 16),
    ("bfloat16", {"dtype": torch.bfloat16}, {"dtype": torch.float16}, 1),
])
def test_a_fault_in_some_calls_only(name, wrong, right, elements):
    assert differing(name, inputs(**wrong))["output"] == [elements]
    assert differing(name, inputs(**right)) == {"output": [0], "score": [0], "slot": [0]}


def test_the_second_call_with_a_shape_alone_is_wrong():
    planted = made("second-call")
    for given in (inputs(), inputs(slots=5)):
        right = Fast()(**given)
        assert [torch.equal(planted(**given).output, right[0]) for _ in range(4)] == [True, False, True, True]


def test_a_second_stream_is_not_a_matter_of_the_cpu():
    assert sum(differing("stream", inputs(), 20)["score"]) == 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_three_bounds_are_beyond_the_bound(dtype):
    from kvtwin.conformance.cases import oracle
    from kvtwin.conformance.cases.case import DecodeCase
    from kvtwin.conformance.judge import bounds
    from kvtwin.reference import longflow

    given = inputs(dtype=dtype)
    case = DecodeCase.of(*given.values())
    truth = oracle.oracle(longflow.decode_attention, case).output
    for seed in range(5):
        share = (made("three-bounds", seed)(**given).output.double() - truth).abs() / bounds.decode_output(case)
        assert (share > 1).sum() == 1 and 2 < share.max() < 4


def test_a_state_that_is_wrong_only_in_its_500th_step_is_found():
    from kvtwin.conformance.lab.implementations.longflow_states import LongFlow
    from kvtwin.reference.longflow import LongFlowConfig

    sizes: dict[str, Any] = {
        "batch": 1, "query_heads": 2, "key_value_heads": 1, "head_dim": 8, "dtype": torch.float32, "device": "cpu",
    }
    config = LongFlowConfig(budget=4)
    late, right = made("state-500")(config, **sizes), LongFlow(config, **sizes)
    draw = torch.Generator().manual_seed(1)
    differ = []
    for step in range(1, 502):
        token = [torch.randn(1, heads, 8, generator=draw) for heads in (2, 1, 1)]
        late.step(*token)
        right.step(*token)
        if not torch.equal(late.next_slot, right.next_slot):
            differ.append(step)
            right.next_slot = late.next_slot
    assert differ == [500]


def test_misplaced_elements_are_their_neighbours():
    tensor = torch.arange(6.0).view(2, 3)
    assert misplaced(tensor, tensor == 4).tolist() == [[0, 1, 2], [3, 3, 5]]


#: The faults that the verdict on a CPU finds in a few cases, and a part of the id of the tests that find them.
FOUND = {
    "row-10": "test_choices_are_right", "element-10": "test_numbers", "bits-10": "test_calls",
    "prompt-element-10": "test_numbers and not heads", "last-tile": "test_large", "second-call": "test_calls",
    "bfloat16": "test_numbers or test_layouts or test_calls", "three-bounds": "test_numbers",
    "batch": "test_choices_of_many_rows", "slots": "test_large",
}
NEVER_ALONE = {"row", "element", "bits", "prompt-element"}


def test_every_fault_that_a_cpu_can_show_is_tried():
    kinds = {name: fault for name, fault in FAULTS.items() if name.rpartition("-")[0] not in NEVER_ALONE}
    shown = {name for name, fault in kinds.items() if "cpu" not in fault.blind}
    assert shown | {f"{kind}-10" for kind in NEVER_ALONE} == set(FOUND)


@pytest.mark.slow
@pytest.mark.parametrize("name", FOUND)
def test_the_verdict_finds_it(name, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    fault: Fault = FAULTS[name]
    found = run.verdict_of(
        fault.method, vars(fault.provided(1)), {}, FOUND[name], tmp_path, monkeypatch, "suite/test_properties.py"
    )
    assert found.verdict == verdict.WRONG, run.summary_of(found)
