"""KIVI's state: when keys and values are quantized, what a step attends to, padding, memory, and refused sizes:
what only our own sides promise.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from kvtwin.conformance.cases.case import DecodeCase
from kvtwin.conformance.cases.state_trace import StateTrace
from kvtwin.conformance.judge import bounds, checkers, lockstep
from kvtwin.conformance.judge.compare import assert_same
from kvtwin.conformance.suite.kivi.test_kivi_state import KIT, SMALL, both_sides, new_state, tokens
from kvtwin.conformance.suite.quantized_states import assert_same_codes

pytestmark = pytest.mark.kind("equivalence")

BATCH, HEADS, HEAD_DIM = KIT.batch, KIT.heads, KIT.head_dim


def quantized(state: Any) -> tuple[list[int], list[int]]:
    return state.keys_quantized.tolist(), state.values_quantized.tolist()


@both_sides
@pytest.mark.parametrize(("count", "keys", "values"), [(1, 0, 0), (4, 4, 0), (5, 4, 1), (7, 4, 3), (8, 8, 4)])
def test_a_prompt_leaves_t_mod_r_keys_and_r_values_unquantized(count, keys, values, side, twins, device):
    state = new_state(getattr(twins, side), device)
    given = tokens(device, count)
    state.prefill(*given)
    assert quantized(state) == ([keys] * BATCH, [values] * BATCH)
    unquantized = slice(keys, count), slice(values, count)
    for held, own, part in zip((state.key, state.value), given[1:], unquantized, strict=True):
        assert_same(held[:, :, part], own[:, :, part], what="unquantized tokens")
        before = slice(0, part.start)
        assert not bool((held[:, :, before] == own[:, :, before]).all()) or part.start == 0, "nothing was quantized"


@both_sides
def test_keys_leave_r_at_a_time_and_values_one_at_a_time(side, twins, device):
    state = new_state(getattr(twins, side), device)
    seen = []
    given = tokens(device, 9)
    for number in range(9):
        state.step(*(tensor[:, :, number] for tensor in given))
        seen.append(tuple(one[0] for one in quantized(state)))
    assert seen == [(0, 0), (0, 0), (0, 0), (4, 0), (4, 1), (4, 2), (4, 3), (8, 4), (8, 5)]


@both_sides
def test_one_token_at_a_time_stores_what_a_prompt_does(side, twins, device):
    """Groups of keys begin at the same tokens, so the codes are the same bits."""
    KIT.check_steps_store_what_a_prompt_does(getattr(twins, side), device, 11)


@both_sides
@pytest.mark.parametrize("prompt", [0, 3])
def test_a_step_attends_before_it_quantizes(prompt, side, twins, device):
    """With R = 4, the step that completes the residual still reads its own four keys as they came."""
    state, given = new_state(getattr(twins, side), device), tokens(device, 4)
    if prompt:
        state.prefill(*(tensor[:, :, :prompt] for tensor in given))
    for number in range(prompt, 4):
        output = state.step(*(tensor[:, :, number] for tensor in given))
    assert quantized(state)[0] == [4] * BATCH
    KIT.check_output_is_unquantized(output, given, 3)


@both_sides
def test_the_step_after_reads_what_was_quantized(side, twins, device):
    """Its output is not that of the keys as they came: the error of quantization is far beyond the bound."""
    state, given = new_state(getattr(twins, side), device, key_bits=2), tokens(device, 5)
    query, key, value = given
    for number in range(5):
        output = state.step(*(tensor[:, :, number] for tensor in given))
    occupied = torch.ones(BATCH, 5, dtype=torch.bool, device=device)
    case = DecodeCase.of(query[:, :, 4], key, value, occupied)
    error = (output.double() - case.attention.output[:, :, 0]).abs()
    assert float((error / bounds.decode_output(case)).max()) > 100


@both_sides
def test_a_residual_of_all_tokens_is_full_attention(side, twins, device):
    state, given = new_state(getattr(twins, side), device, residual=24), tokens(device, 12)
    state.prefill(*(tensor[:, :, :9] for tensor in given))
    for number in range(9, 12):
        output = state.step(*(tensor[:, :, number] for tensor in given))
        KIT.check_output_is_unquantized(output, given, number)
    assert quantized(state) == ([0] * BATCH, [0] * BATCH)


@both_sides
def test_padding_takes_no_slot(side, twins, device):
    """A padded row holds the codes of the same tokens without padding, and its output is the same."""
    given = tokens(device, 9)
    occupied = torch.ones(BATCH, 9, dtype=torch.bool, device=device)
    occupied[1, [0, 1, 4]] = False
    padded, alone = new_state(getattr(twins, side), device), new_state(getattr(twins, side), device, batch=1)
    padded.prefill(*given, occupied)
    alone.prefill(*(tensor[1:, :, occupied[1]] for tensor in given))
    for number in range(4):
        token = [tensor[:, :, 0] for tensor in tokens(device, 1, seed=10 + number)]
        outputs = padded.step(*token)[1:], alone.step(*(tensor[1:] for tensor in token))
        assert_same(*outputs, what="output")
        assert_same_codes(padded, alone, slice(1, None))
    assert quantized(padded) == ([12, 8], [9, 6])
    assert padded.positions[1, :10].tolist() == [2, 3, 5, 6, 7, 8, 9, 10, 11, 12]
    assert padded.tokens_seen == 13


@both_sides
def test_a_full_state_refuses_a_token_and_stays_as_it_was(side, twins, device):
    KIT.check_a_full_state_refuses_a_token(getattr(twins, side), device, 6)


def test_a_replayed_step_beyond_the_last_slot_drops_its_token(twins, device):
    KIT.check_a_replay_beyond_the_last_slot_drops_its_token(twins.optimized, device, 6)


@pytest.mark.parametrize("bits", [2, 4])
def test_the_memory_of_a_state_is_that_of_its_codes(bits, twins, device):
    """Of T quantized tokens: T D bits for codes, and a scale and a minimum per group; R and R + 1 unquantized."""
    options = {"key_bits": bits, "value_bits": bits, "group": 16, "residual": 16, "max_tokens": 64}
    state = new_state(twins.optimized, device, **options)
    item = 4
    def groups(count: int) -> int:
        return 2 * item * count * HEAD_DIM // 16

    codes = (64 + 48) * HEAD_DIM * bits // 8
    buffers = (16 + 17) * HEAD_DIM * item
    found = [*state.codes_of_keys(), *state.codes_of_values()]
    assert sum(part.nbytes for part in found) == BATCH * HEADS * (codes + groups(64) + groups(48))
    if hasattr(state, "_keys"):
        assert state._keys.nbytes + state._values.nbytes == BATCH * HEADS * buffers
    given = tokens(device, 40)
    state.prefill(*given)
    held = checkers.checker_of("kivi").bytes_of(state)
    expected = BATCH * HEADS * ((32 + 24) * HEAD_DIM * bits // 8 + groups(32) + groups(24) + (8 + 16) * HEAD_DIM * item)
    assert held == expected < 2 * BATCH * HEADS * 40 * HEAD_DIM * item


@pytest.mark.parametrize("options", [
    {"key_bits": 2, "value_bits": 4, "group": 2, "residual": 4}, {"key_bits": 4, "value_bits": 2, "group": 1},
    {"key_bits": 2, "value_bits": 2, "group": 16, "residual": 16},
], ids=str)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_many_steps_keep_step_with_float64(dtype, options, twins, device):
    """Two rounds of quantization, with rows of different lengths."""
    trace = StateTrace(
        method="kivi", config=tuple({**SMALL, "max_tokens": 48, **options}.items()), batch=2, group=2, head_dim=16,
        dtype=dtype, prompt=19, padding="left_padding", steps=17, seed=4, device=str(device),
    )
    summary = lockstep.run(trace, twins.optimized.baselines.kivi)
    assert summary.steps == 17
