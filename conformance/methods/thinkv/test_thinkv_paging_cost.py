"""The cost of ThinKV's paged cache: bytes and bits, counted by hand."""

from __future__ import annotations

import pytest
import torch

from kvtwin.conformance.cases.paged_cases import empty, leave, put

sides = pytest.mark.parametrize("side", ("reference", "optimized"))


@sides
def test_bytes_by_hand(side, twins, device):
    """D = 16, two heads, groups of 4, blocks of 2, float16, with each term written out."""
    cache = empty(getattr(twins, side).thinkv, device, batch=2, heads=2, dtype=torch.float16,
                  formats="nvfp4 fp8 ternary", tokens=16)
    config = cache.config
    nothing = cache.bytes_allocated()
    buffers = 2 * 2 * 4 * 2 * 16 * 2                                               # K, V; rows; tokens; heads; D; bytes
    entries = config.blocks
    tables = 2 * (21 * (entries * 2 + 4) + 21 * entries + 4 * config.peak + 8 * config.segments + 33)
    assert nothing == buffers + tables
    assert cache.bits_per_element() == 0.0
    put(cache, 0, 3, thought=2)                                                    # nvfp4: two blocks in each row
    nvfp4 = 2 * 2 * 2 * (8 + 8 + 4)                                                # per slot and head
    key_scales = 2 * 16
    assert cache.bytes_allocated() == nothing + 2 * (nvfp4 + key_scales)
    assert cache.bits_per_element() == 8 * (nvfp4 + key_scales) / (3 * 2 * 2 * 16)
    put(cache, 3, 2, thought=1)                                                    # fp8: one block
    fp8, chunk = 1 * 2 * 2 * (16 + 16), 2 * 8
    put(cache, 5, 1, thought=0)                                                    # ternary: one block
    ternary = 1 * 2 * 2 * (4 + 4 + 4)
    total = nvfp4 + key_scales + fp8 + chunk + ternary + key_scales
    assert cache.bytes_allocated() == nothing + 2 * total
    assert cache.bits_per_element() == 8 * total / (6 * 2 * 2 * 16)
    leave(cache, 2)                                                           # a block is released, its key scales stay
    assert cache.bytes_allocated() == nothing + 2 * (total - nvfp4 // 2)
    leave(cache, 3, 4)
    assert cache.bytes_allocated() == nothing + 2 * (nvfp4 // 2 + key_scales + ternary + key_scales)
    leave(cache, 0, 1, 5)
    assert cache.bytes_allocated() == nothing


@sides
def test_a_full_cache_has_half_a_bit_of_scales(side, twins, device):
    """With groups of 16 in full blocks of 8 and D = 16, keys and values take 4 + 8/16 bits per element."""
    cache = empty(getattr(twins, side).thinkv, device, group=16, block=8, tokens=32, tau=16)
    for segment in range(2):
        put(cache, 16 * segment, 16, thought=2, segment=segment)
    assert cache.bits_per_element() == 4.5
