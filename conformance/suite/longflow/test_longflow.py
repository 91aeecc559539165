"""LongFlow under test against float64: output, scores and the slot to overwrite, for all kinds of content.

test_lockstep.py tests its state over drawn traces.
"""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvtwin.conformance.cases.case import DecodeCase
from kvtwin.conformance.cases.draws import at_least
from kvtwin.conformance.cases.oracle import attend
from kvtwin.conformance.cases.state_trace import StateTrace
from kvtwin.conformance.cases.strategies import DECIDED, decode_cases, window_cases
from kvtwin.conformance.judge import bounds, lockstep
from kvtwin.conformance.judge.checkers import longflow as judge
from kvtwin.conformance.judge.checkers.snapkv import assert_compress_right
from kvtwin.conformance.judge.compare import assert_same, assert_within

pytestmark = [pytest.mark.kind("equivalence"), pytest.mark.first]

some = settings(max_examples=max(at_least(4), settings().max_examples // 2))
few = settings(max_examples=max(at_least(3), settings().max_examples // 4))

# Logits that break a softmax without a running maximum: exp overflows, the sum overflows, or everything underflows.
BREAKING = ("overflow_88", "many_87", "all_below_104", "extreme_1e4")
# Contents with tokens that must have equal scores, so that the tie rule decides exactly.


@given(case=decode_cases())
def test_longflow_decodes_as_float64_would(case, twins):
    """For any shape, dtype, layout, mask and content, with poisoned free slots."""
    judge.assert_decode_right(twins.optimized.longflow.decode_attention(**case.inputs), case)


@pytest.mark.property("extreme_numbers")
@pytest.mark.parametrize("slots", (299, 300))
@pytest.mark.parametrize("content", ("ordinary", "extreme_1e4"))
def test_longflow_carries_the_softmax_over_several_tiles(content, slots, twins, device):
    """From tile to tile of one program, the maximum rises in some rows and falls in others."""
    case = DecodeCase(
        batch=4, key_value_heads=2, group=4, head_dim=16, slots=slots, content=content, seed=1, device=str(device)
    )
    judge.assert_decode_right(twins.optimized.longflow.decode_attention(**case.inputs), case)


SCORED = ("ordinary", "dominant", "near_ties")


@given(case=decode_cases(occupancy=("full",), protect=("none", "newest"), content=SCORED))
@some
def test_longflow_evicts_what_float64_would(case, twins):
    """Full caches, where scores decide every choice."""
    actual = twins.optimized.longflow.decode_attention(**case.inputs)
    judge.assert_slot_right(actual.slot, case)


@pytest.mark.parametrize("content", BREAKING)
@given(data=st.data())
@few
def test_longflow_survives_the_logits_that_break_the_papers_kernel(content, data, twins):
    """The output is finite and the victim is right for logits at which expf overflows (LF-12)."""
    case = data.draw(decode_cases(content=(content,), occupancy=("full", "random")))
    actual = twins.optimized.longflow.decode_attention(**case.inputs)
    assert bool(actual.output.isfinite().all())
    judge.assert_decode_right(actual, case)


def rebuilt(case: DecodeCase, change) -> DecodeCase:
    """The case with `change(name, tensor)` applied to each of its tensors."""
    tensors = {
        name: None if tensor is None else change(name, tensor)
        for name, tensor in (
            ("query", case.query), ("key", case.key), ("value", case.value), ("occupied", case.occupied),
            ("protected", case.protected),
        )
    }
    return DecodeCase.of(**tensors, scale=case.scale, per_head=case.per_head)


@pytest.mark.property("independence")
@given(case=decode_cases(occupancy=("full",)), seed=st.integers(0, 2**32 - 1))
@few
def test_longflow_does_not_depend_on_slot_order(case, seed, twins, device):
    """With permuted slots, the result is right by the same truth. Where only one answer is right, the same token is
    evicted."""
    order = torch.randperm(case.slots, generator=torch.Generator(device).manual_seed(seed), device=device)
    permuted = rebuilt(case, lambda name, tensor: {
        "query": lambda: tensor, "key": lambda: tensor[:, :, order], "value": lambda: tensor[:, :, order],
    }.get(name, lambda: tensor[..., order])())
    decode = twins.optimized.longflow.decode_attention
    plain, moved = decode(**case.inputs), decode(**permuted.inputs)
    verdict = judge.assert_decode_right(moved, permuted)
    tie = judge.tie_classes(case.key, case.value, case.occupied, per_head=case.per_head)
    classes = (tie == tie.gather(-1, plain.slot[..., None])).sum(-1)
    # The index decides among equal tokens, and indices were permuted.
    assert_same(order[moved.slot], plain.slot, where=verdict.decisive & (classes == 1), what="the evicted token")


@pytest.mark.property("independence")
@given(case=decode_cases(occupancy=("full",)), shift=st.integers(1, 3))
@few
def test_longflow_does_not_depend_on_head_order(case, shift, twins):
    """KV heads permuted with their groups of query heads."""
    heads = torch.arange(case.key_value_heads, device=case.query.device).roll(shift)
    queries = (heads[:, None] * case.group + torch.arange(case.group, device=heads.device)).flatten()

    def change(name, tensor):
        if name == "query":
            return tensor[:, queries]
        return tensor[:, heads] if name in ("key", "value") or case.per_head else tensor

    permuted = rebuilt(case, change)
    decode = twins.optimized.longflow.decode_attention
    plain, moved = decode(**case.inputs), decode(**permuted.inputs)
    verdict = judge.assert_decode_right(moved, permuted)
    expected = plain.slot[:, heads] if case.per_head else plain.slot
    assert_same(moved.slot, expected, where=verdict.decisive, what="the evicted slot")


@pytest.mark.property("independence")
@given(case=decode_cases(occupancy=("full", "random")), extra=st.integers(1, 20))
@few
def test_longflow_ignores_extra_padding_slots(case, extra, twins):
    """With free slots appended that contain NaN, output and scores are the same within the bound, and the first free
    slot is next."""
    def pad(name, tensor):
        if name == "query":
            return tensor
        if name in ("key", "value"):
            return torch.cat((tensor, tensor.new_full((*tensor.shape[:2], extra, tensor.shape[3]), torch.nan)), 2)
        return torch.cat((tensor, tensor.new_zeros((*tensor.shape[:-1], extra))), -1)

    padded = rebuilt(case, pad)
    actual = twins.optimized.longflow.decode_attention(**padded.inputs)
    judge.assert_decode_right(actual, padded)
    assert_within(
        actual.output, attend(case.query, case.key, case.value, case.occupied, scale=case.scale).output[:, :, 0],
        bounds.decode_output(padded), what="output with padding slots",
    )


@pytest.mark.property("independence")
@given(case=decode_cases(), row=st.integers(0, 2))
@few
def test_longflow_decodes_a_row_the_same_alone_and_in_a_batch(case, row, twins):
    """Another batch size may split the work differently. The result is within the same bounds, and equal where the
    choice is decisive."""
    row %= case.batch
    alone = rebuilt(case, lambda name, tensor: tensor[row:row + 1])
    decode = twins.optimized.longflow.decode_attention
    single, batched = decode(**alone.inputs), decode(**case.inputs)
    verdict = judge.assert_decode_right(single, alone)
    assert_same(single.slot, batched.slot[row:row + 1], where=verdict.decisive, what="slot of the row alone")


@pytest.mark.property("state")
@pytest.mark.slow_on_cpu
@pytest.mark.parametrize("per_head", [False, True])
def test_longflow_state_keeps_step_over_many_evictions(per_head, twins, device):
    """Slots are reused many times, so stale scores, masks or norms would be noticed."""
    gpu = device.type == "cuda"
    config = {"budget": 100 if gpu else 5, "per_head": per_head, "sinks": 1, "window": 4}
    trace = StateTrace(
        batch=2, key_value_heads=1, group=2, head_dim=16, dtype=torch.float16, seed=per_head + 1, device=str(device),
        config=tuple(config.items()), prompt=150 if gpu else 9, padding="left_padding", steps=600 if gpu else 40,
    )
    summary = lockstep.run(trace, twins.optimized.longflow)
    assert summary.steps == trace.steps
    assert summary.decisive > trace.steps, "most choices must be decisive"


@given(case=window_cases(content=DECIDED))
@some
def test_longflow_compresses_a_prompt_as_float64_would(case, twins):
    assert_compress_right(twins.optimized.longflow.compress_prefill(**case.inputs), case)
