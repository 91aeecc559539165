"""KIVI's step in one-warp programs, for wide heads of 16-bit numbers: a lane takes the numbers of its own words.

Tiles have 8 words of keys: 128 tokens of 2 bits, 64 of 4.
"""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch

from kvtwin.conformance.cases.state_trace import StateTrace
from kvtwin.conformance.judge import lockstep
from kvtwin.conformance.judge.checkers import kivi as judge
from kvtwin.conformance.judge.compare import assert_same
from kvtwin.optimized.baselines import kivi_ops as ours

pytestmark = [pytest.mark.kind("equivalence"), pytest.mark.first]

BF16, FP16 = torch.bfloat16, torch.float16
long = pytest.mark.slow_on_cpu
#: dtype, D, query heads per KV head, bits of keys and values, group, residual, tokens of the prompt.
CASES = [
    pytest.param(BF16, 128, 4, 2, 2, 32, 32, 170, id="2-bits-two-tiles"),
    pytest.param(FP16, 128, 1, 2, 2, 64, 64, 195, id="2-bits-float16-three-tokens-in-a-tile", marks=long),
    pytest.param(BF16, 128, 8, 4, 4, 32, 32, 97, id="4-bits-one-token-in-a-tile"),
    pytest.param(FP16, 64, 3, 4, 4, 16, 48, 112, id="4-bits-float16-narrow-whole-tile"),
    pytest.param(BF16, 64, 2, 4, 4, 16, 16, 230, id="4-bits-two-tiles-in-each-program"),
    pytest.param(BF16, 128, 2, 4, 4, 128, 128, 200, id="4-bits-a-group-of-two-tiles"),
    pytest.param(BF16, 64, 2, 2, 4, 16, 16, 150, id="2-and-4-bits", marks=long),
    pytest.param(FP16, 128, 5, 4, 2, 16, 16, 85, id="4-and-2-bits", marks=long),
    pytest.param(BF16, 128, 2, 2, 2, 128, 128, 126, id="nothing-quantized-yet"),
]


@pytest.mark.parametrize("padding", ["none", pytest.param("left_padding", marks=long)])
@pytest.mark.parametrize(
    ("dtype", "head_dim", "group_heads", "key_bits", "value_bits", "group", "residual", "prompt"), CASES
)
def test_a_step_in_fragments_keeps_step(
    dtype, head_dim, group_heads, key_bits, value_bits, group, residual, prompt, padding, twins, device
):
    assert ours.in_fragments(dtype, group_heads, head_dim, group, key_bits, value_bits), "another kernel would run"
    config: dict[str, Any] = {
        "key_bits": key_bits, "value_bits": value_bits, "group": group, "residual": residual, "max_tokens": 256,
    }
    lockstep.run(StateTrace(
        method="kivi", config=tuple(config.items()), dtype=dtype, head_dim=head_dim, group=group_heads, batch=2,
        key_value_heads=1 if padding == "none" else 2, prompt=prompt, steps=3, padding=padding, seed=4,
        device=str(device),
    ), twins.optimized.baselines.kivi)


@pytest.mark.parametrize(("key_bits", "value_bits", "prompt"), [
    (2, 2, 170), (4, 4, 97), (4, 4, 170), (4, 4, 72), pytest.param(2, 4, 31, marks=long),
])
def test_free_memory_changes_nothing(key_bits, value_bits, prompt, twins, device):
    """Keys and values that left the buffers, and codes of tokens that did not."""
    kivi = twins.optimized.baselines.kivi
    config = kivi.KIVIConfig(key_bits, value_bits, group=32, residual=32, max_tokens=256)
    generator = torch.Generator().manual_seed(1)
    given = [torch.randn(1, heads, prompt + 1, 128, generator=generator).to(device, BF16) for heads in (4, 2, 2)]
    outputs, codes = [], []
    for poisoned in (False, True):
        state = kivi.KIVIState(
            config, batch=1, query_heads=4, key_value_heads=2, head_dim=128, dtype=BF16, device=device
        )
        state.prefill(*(tensor[:, :, :prompt] for tensor in given))
        if poisoned:
            judge.poison(state)
        codes.append((*state.codes_of_keys(), *state.codes_of_values()))
        outputs.append(state.step(*(tensor[:, :, prompt] for tensor in given)))
    assert_same(outputs[1], outputs[0], what="output")
    for one, other in zip(codes[1], codes[0], strict=True):
        assert_same(one, other, what="codes, scales or minima")


@pytest.mark.parametrize(("key_bits", "value_bits", "prompt"), [(2, 2, 156), (4, 4, 93)])
def test_equal_values_are_the_output(key_bits, value_bits, prompt, twins, device):
    """Around the end of a tile: with the weight of one more token in the sum, the output would be smaller."""
    kivi = twins.optimized.baselines.kivi
    state = kivi.KIVIState(
        kivi.KIVIConfig(key_bits, value_bits, group=32, residual=32, max_tokens=256), batch=1, query_heads=2,
        key_value_heads=1, head_dim=128, dtype=BF16, device=device,
    )

    def given(*time: int) -> tuple[torch.Tensor, ...]:
        zeros = torch.zeros(1, 1, *time, 128, dtype=BF16, device=device)
        return zeros.repeat_interleave(2, 1), zeros, zeros + 1

    state.prefill(*given(prompt))
    for _ in range(7):
        output = state.step(*given())
        assert_same(output, torch.ones_like(output), what="output")


def test_a_later_group_of_two_tiles_has_its_own_scales(twins, device):
    """In the third tile, which is in the second group, 14 keys equal the query and their values are 1. All other keys
    and values are 0."""
    kivi = twins.optimized.baselines.kivi
    state = kivi.KIVIState(
        kivi.KIVIConfig(4, 4, group=128, residual=128, max_tokens=288), batch=1, query_heads=1, key_value_heads=1,
        head_dim=128, dtype=BF16, device=device,
    )
    query = torch.ones(1, 1, 271, 128, dtype=BF16, device=device)
    found = torch.zeros_like(query)
    found[:, :, 128:142] = 1
    state.prefill(*(tensor[:, :, :270] for tensor in (query, found, found)))
    output = state.step(*(tensor[:, :, 270] for tensor in (query, found, found)))
    # Rounding weights and output to 8 bits adds at most 2^-8. The other 257 keys have e^-11.3 times the weight: 3e-4.
    assert bool((output - 1).abs().max() < 2.0**-7)


@pytest.mark.parametrize("key_bits", [2, 4])
@pytest.mark.parametrize("group", [16, 32, 128])
def test_memory_has_room_for_what_is_read(group, key_bits):
    """Whole tiles, and the keys of the tile behind the last one."""
    tile = 8 * 32 // key_bits
    for rows, needed in itertools.product((1, tile - 1, tile, tile + 1, 5 * tile), (1, 3, 9)):
        groups, values = ours.fragment_room(needed, rows, group, key_bits)
        tiles = -(-rows // tile)
        assert groups >= needed and groups * group >= (tiles + 1) * tile
        assert values == tiles * tile
        assert groups * group % tile == 0


@pytest.mark.parametrize(("dtype", "group_heads", "head_dim", "group", "key_bits", "value_bits"), [
    (torch.float32, 1, 128, 32, 2, 2), (BF16, 9, 128, 32, 2, 2), (BF16, 1, 96, 32, 2, 2), (BF16, 1, 64, 32, 2, 2),
    (BF16, 1, 128, 8, 2, 4), (BF16, 1, 128, 8, 4, 2), (BF16, 1, 128, 8, 4, 4), (BF16, 1, 64, 8, 2, 4),
    (BF16, 1, 256, 32, 2, 2),
])
def test_other_sizes_use_the_kernel_for_all(dtype, group_heads, head_dim, group, key_bits, value_bits):
    """float32, more than 8 query heads, a lane without a whole word, words of two groups."""
    assert not ours.in_fragments(dtype, group_heads, head_dim, group, key_bits, value_bits)
