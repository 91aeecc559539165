"""PM-KVQ's state: when tokens are quantized and codes shrink, what a step attends to, padding, memory, wrong sizes:
what only our own sides promise.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from kvtwin.conformance.cases.state_trace import StateTrace
from kvtwin.conformance.judge import checkers, lockstep
from kvtwin.conformance.judge.compare import Mismatch, assert_same
from kvtwin.conformance.suite.pm_kvq.test_pm_kvq_state import KIT, SMALL, both_sides, new_state, tokens
from kvtwin.conformance.suite.quantized_states import assert_same_codes, at

pytestmark = pytest.mark.kind("equivalence")


def quantized(state: Any) -> tuple[int, int]:
    """The quantized tokens of the first row, and the bits of their codes."""
    return int(state.tokens_quantized[0]), state.width


@both_sides
@pytest.mark.parametrize(("count", "packed", "width"), [(1, 0, 16), (4, 0, 16), (5, 4, 16), (8, 4, 8), (23, 20, 2)])
def test_a_prompt_quantizes_whole_windows_behind_the_sinks(count, packed, width, side, twins, device):
    state, given = new_state(getattr(twins, side), device), tokens(device, count)
    state.prefill(*given)
    assert quantized(state) == (packed, width)
    for held, own in zip((state.key, state.value), given[1:], strict=True):
        unquantized = [0, *range(1 + packed, count)]
        assert_same(held[:, :, unquantized], own[:, :, unquantized], what="sinks and window")
        assert not packed or not bool((held[:, :, 1:1 + packed] == own[:, :, 1:1 + packed]).all())


@both_sides
def test_a_full_window_is_quantized_at_once_and_codes_shrink_when_memory_is_short(side, twins, device):
    state, given, seen = new_state(getattr(twins, side), device), tokens(device, 21), []
    for number in range(21):
        state.step(*at(given, number))
        seen.append(quantized(state))
    assert seen == [
        *[(0, 16)] * 4, *[(4, 16)] * 3, (4, 8), *[(8, 8)] * 3, (8, 4), *[(12, 4)] * 4, *[(16, 4)] * 3, (16, 2), (20, 2)
    ]


@both_sides
@pytest.mark.parametrize("count", [5, 8, 13, 24])
def test_one_token_at_a_time_stores_what_a_prompt_does(count, side, twins, device):
    """Tokens that enter late have shrunk as often as those that were quantized with more bits. 5 tokens are the sink
    and one window."""
    KIT.check_steps_store_what_a_prompt_does(getattr(twins, side), device, count)


@both_sides
@pytest.mark.parametrize(("bits", "count"), [(16, 24), (8, 8), (4, 14), (2, 23)])
def test_codes_are_those_of_16_bits_shrunk(bits, count, side, twins, device):
    pm_kvq = getattr(twins, side).baselines.pm_kvq
    state, (query, key, value) = new_state(getattr(twins, side), device, bits=16 if bits == 16 else 5), tokens(
        device, count
    )
    state.prefill(query, key, value)
    packed = slice(1, 1 + quantized(state)[0])
    assert state.width == bits
    for found, numbers in ((state.codes_of_keys(), key), (state.codes_of_values(), value)):
        expected, width = pm_kvq.quantize(numbers[:, :, packed], group=8), 16
        while width > bits:
            shrunk = pm_kvq.shrink(expected.codes, expected.scale, bits=width)
            expected, width = type(expected)(*shrunk, expected.minimum), width // 2
        for name, one, other in zip(found._fields, found, expected, strict=True):
            assert_same(one[:, :, packed], other, what=name)
            outside = torch.ones(24, dtype=torch.bool, device=device)
            outside[packed] = False
            assert not bool(one[:, :, outside].any())


@both_sides
def test_a_step_attends_before_it_quantizes(side, twins, device):
    """The step that completes the window still reads its own four tokens as they came."""
    state, given = new_state(getattr(twins, side), device), tokens(device, 5)
    for number in range(5):
        output = state.step(*at(given, number))
    assert quantized(state) == (4, 16)
    KIT.check_output_is_unquantized(output, given, 4)


@both_sides
def test_the_step_after_reads_codes_of_the_new_width(side, twins, device):
    """The codes of 2 bits are far off the tokens as they came; the step that shrinks them still reads 4 bits."""
    state, given = new_state(getattr(twins, side), device), tokens(device, 21)
    errors = []
    for number in range(21):
        held = state.key[:, :, :number].clone(), state.value[:, :, :number].clone()
        output = state.step(*at(given, number))
        if number in (19, 20):                           # 20 tokens: codes shrink to 2 bits
            seen = [torch.cat((one, own[:, :, number:number + 1]), 2)
                    for one, own in zip(held, given[1:], strict=True)]
            KIT.check_output_is_unquantized(output, [given[0], *seen], number, times=2)
            try:
                KIT.check_output_is_unquantized(output, given, number)
            except Mismatch:
                errors.append(number)
    assert errors == [19, 20]


@both_sides
def test_a_budget_of_16_bits_never_shrinks(side, twins, device):
    state, given = new_state(getattr(twins, side), device, bits=16), tokens(device, 24)
    state.prefill(*given)
    assert quantized(state) == (20, 16)
    step = (state.codes_of_keys().scale.max(), state.codes_of_values().scale.max())
    for held, own, scale in zip((state.key, state.value), given[1:], step, strict=True):
        assert float((held - own).abs().max()) < 0.51 * float(scale)


@both_sides
def test_all_rows_have_one_width_which_padding_counts_for(side, twins, device):
    """Padding takes no slot, but the width follows from the longest sequence, as if padding were stored."""
    given = tokens(device, 9)
    occupied = torch.ones(2, 9, dtype=torch.bool, device=device)
    occupied[1, [0, 1, 4]] = False
    padded = new_state(getattr(twins, side), device)
    padded.prefill(*given, occupied)
    assert (padded.tokens_quantized.tolist(), padded.width, padded.tokens_seen) == ([8, 4], 8, 9)
    assert padded.positions[1, :7].tolist() == [2, 3, 5, 6, 7, 8, -1]
    for held, own in zip((padded.key, padded.value), given[1:], strict=True):
        assert_same(held[1:, :, [0, 5]], own[1:, :, [2, 8]], what="the sink and the window of the second row")
    alone = new_state(getattr(twins, side), device, batch=1)
    alone.prefill(*(tensor[1:, :, occupied[1]] for tensor in given))
    assert alone.width == 16
    for number in range(2):                              # now eight tokens, which have 8 bits without padding as well
        token = at(tokens(device, 1, seed=10 + number), 0)
        padded.step(*token)
        alone.step(*(tensor[1:] for tensor in token))
    assert alone.width == padded.width == 8
    assert_same_codes(padded, alone, slice(1, None))


@both_sides
def test_a_full_state_refuses_a_token_and_stays_as_it_was(side, twins, device):
    KIT.check_a_full_state_refuses_a_token(getattr(twins, side), device, 22)


@pytest.mark.parametrize("max_tokens", [22, 24])
def test_a_replayed_step_beyond_the_last_slot_drops_its_token(max_tokens, twins, device):
    """With 24 tokens, the window is one token short of full."""
    KIT.check_a_replay_beyond_the_last_slot_drops_its_token(twins.optimized, device, max_tokens)


@both_sides
def test_a_reordered_batch_keeps_its_width(side, twins, device):
    state, given = new_state(getattr(twins, side), device), tokens(device, 12)
    occupied = torch.ones(2, 12, dtype=torch.bool, device=device)
    occupied[1, :6] = False
    state.prefill(*given, occupied)
    state.reorder(torch.tensor([1, 1], device=device))
    assert (state.tokens_quantized.tolist(), state.width) == ([4, 4], 4)


@pytest.mark.parametrize(("bits", "units"), [(5, 4), (16, 20), (8, 10)])
def test_the_memory_of_a_state_is_its_budget(bits, units, twins, device):
    """Words for the quantized tokens of the fullest width, in units of a token in 16 bits: at most the budget, and at
    least a window. Codes, windows and sinks of a full state take no more than the budget."""
    state = new_state(twins.optimized, device, bits=bits, dtype=torch.bfloat16)
    if hasattr(state, "_key_words"):
        assert state._key_words.shape == (2, 2, units, 8)
        assert state._key_words.nbytes == 2 * 2 * units * KIT.head_dim * 2
    assert state.budget_bytes == bits * 24 * 2 * KIT.heads * KIT.head_dim // 8
    given = [tensor.bfloat16() for tensor in tokens(device, 24)]
    state.prefill(*given)
    groups = 2 * 2 * 2 * int(state.tokens_quantized.sum()) * KIT.heads * 2
    assert checkers.checker_of("pm_kvq").bytes_of(state) - groups <= 2 * state.budget_bytes


@pytest.mark.parametrize(("dtype", "options"), [
    (torch.bfloat16, {}), (torch.float16, {"bits": 4, "window": 3, "sinks": 0, "group": 128}),
    pytest.param(
        torch.bfloat16, {"bits": 9, "window": 1, "sinks": 2, "least_scale": 0.01}, marks=pytest.mark.slow_on_cpu
    ),
], ids=["bfloat16", "float16", "windows of one token"])
def test_many_steps_keep_step_with_float64(dtype, options, twins, device):
    """Through all widths, with rows of different lengths."""
    trace = StateTrace(
        method="pm_kvq", config=tuple({**SMALL, "max_tokens": 32, **options}.items()), batch=2, group=2, head_dim=16,
        dtype=dtype, prompt=6, padding="left_padding", steps=22, seed=4, device=str(device),
    )
    summary = lockstep.run(trace, twins.optimized.baselines.pm_kvq)
    assert summary.steps == 22


def test_a_prompt_is_packed_into_fields_of_every_width(twins, device):
    """A prompt as long as the memory allows, in units that more than one token shares from 8 bits on."""
    for total in (9, 31):
        trace = StateTrace(
            method="pm_kvq", config=tuple({**SMALL, "max_tokens": 36}.items()), head_dim=32, prompt=total, steps=2,
            seed=total, device=str(device),
        )
        lockstep.run(trace, twins.optimized.baselines.pm_kvq)


def test_lockstep_notices_another_width(twins, device):
    """The judge compares the widths themselves, not only codes."""
    adapter = checkers.checker_of("pm_kvq").Adapter()
    one, other = (new_state(twins.reference, device, bits=bits) for bits in (5, 16))
    for state in (one, other):
        state.prefill(*tokens(device, 12))
    with pytest.raises(Mismatch, match="^width: expected 16, got 4"):
        adapter._same_width(one, other)
    adapter._same_width(one, one)
