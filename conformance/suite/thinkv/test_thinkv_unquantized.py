"""ThinKV without quantization, as in the ablations "w/o TBQ" (table 2) and "TBE" (table 3): the format "unquantized" on
both sides. Its error is 0, so everything that is stored comes back bit by bit.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from kvtwin.conformance.cases.draws import is_quick
from kvtwin.conformance.cases.layouts import lay_out
from kvtwin.conformance.cases.paged_cases import WHOLE, empty, leave, numbers
from kvtwin.conformance.judge import lockstep
from kvtwin.conformance.judge.compare import assert_same
from kvtwin.reference.contract.thinkv.types import Thought

pytestmark = pytest.mark.kind("equivalence")

SIDES = pytest.mark.parametrize("side", ("reference", "optimized"))
SHORT = (torch.float16, torch.bfloat16)
DTYPES = pytest.mark.parametrize("dtype", (*SHORT, torch.float32), ids=str)


def bits(x: Tensor) -> Tensor:
    return x.contiguous().view({2: torch.int16, 4: torch.int32}[x.element_size()])


def patterns(dtype: torch.dtype) -> Tensor:
    """Numbers with every bit pattern of a 16-bit dtype, [256, 256]; for float32, with every upper half."""
    upper = torch.arange(-(2**15), 2**15)
    if dtype == torch.float32:
        return (upper * 2**16 + (upper * 40503) % 2**16).to(torch.int32).view(dtype).view(256, 256)
    return upper.to(torch.int16).view(dtype).view(256, 256)


# Tensors -------------------------------------------------------------------------------------------------------------


@pytest.mark.property("accuracy")
@SIDES
@DTYPES
@pytest.mark.parametrize("axis", (-1, -2))
def test_every_bit_pattern_comes_back(axis, dtype, side, twins, device):
    """NaN with its payload, the sign of zero, subnormal numbers and infinities included."""
    module = getattr(twins, side).thinkv
    x = patterns(dtype).to(device)
    q = module.quantize(x, "unquantized", axis=axis)
    assert (q.codes.dtype, q.codes.shape, q.scales.shape, q.scales.dtype) == (dtype, x.shape, (0,), torch.uint8)
    assert (q.fmt, q.axis, q.group, q.shape, q.tensor_scale) == ("unquantized", axis, 16, x.shape, None)
    for back in (q.codes, module.dequantize(q, dtype)):
        assert_same(bits(back), bits(x), what="bits")


@pytest.mark.property("layouts")
@SIDES
@pytest.mark.parametrize("layout", ["sliced", "spread", "channels_first", "transposed"])
def test_a_copy_is_kept_whatever_the_strides(layout, side, twins, device):
    """The result shares no memory with its input."""
    module = getattr(twins, side).thinkv
    x = torch.randn(2, 2, 5, 20, generator=torch.Generator().manual_seed(1)).half().to(device)
    spread = lay_out(x.clone(), layout)
    q = module.quantize(spread, "unquantized", axis=-2)
    assert q.codes.is_contiguous()
    spread.zero_()
    back = module.dequantize(q, torch.float16)
    q.codes.zero_()
    assert_same(bits(back), bits(x), what="bits")


# The cache -----------------------------------------------------------------------------------------------------------


@pytest.mark.property("accuracy")
@SIDES
@DTYPES
@pytest.mark.parametrize("head_dim", (16, 17))
def test_a_cache_keeps_every_bit(head_dim, dtype, side, twins, device):
    """Keys and values of two heads in blocks of which some slots are used again, and one thought type that is
    quantized. Every number is a float32 number, so `dequantized` shows its bits."""
    cache = empty(
        getattr(twins, side).thinkv, device, heads=2, dtype=dtype, formats="unquantized nvfp4 unquantized",
        head_dim=head_dim, tokens=64,
    )
    chosen = patterns(dtype).flatten()[torch.arange(24 * 2 * 2 * head_dim) * 997 % 2**16].view(24, 2, 1, 2, head_dim)
    chosen = chosen.to(device)
    if dtype == torch.float16:                                          # a NaN becomes any NaN when it becomes float32
        chosen = chosen.where(~chosen.isnan(), -0.0)
    for position, (key, value) in enumerate(chosen):
        cache.append(key, value, numbers(position, device=device))
        if position % 3 == 2:
            cache.flush(*(numbers(x, device=device) for x in (True, (2, 0, 1)[position // 3 % 3], position // 9)))
        if position == 15:
            leave(cache, 1, 2, 4, 10)
    held, by_slot = cache.positions[0], cache.dequantized()
    kept = [slot for slot in range(len(held)) if held[slot] >= 0 and cache.thoughts[0, slot] != Thought.EXECUTION]
    assert len(kept) == 14, "of 24 tokens, four were evicted and six are quantized"
    for side_of in range(2):
        expected = chosen[held[kept], side_of, 0].transpose(0, 1).float()               # [Hkv, n, D]
        assert_same(bits(by_slot[side_of][0][:, kept]), bits(expected), what=("keys", "values")[side_of])
    for part in cache.codes():
        assert not bool(part[0][:, kept].any()), "tokens that are not quantized have no codes"


@pytest.mark.property("accuracy")
@SIDES
@DTYPES
def test_attention_to_one_token_returns_its_value(dtype, side, twins, device):
    """Its weight is 1. Small and large numbers keep all their bits."""
    module = getattr(twins, side).thinkv
    cache = empty(module, device, batch=3, dtype=dtype, formats=WHOLE[0])
    kinds = numbers(0, 1, 2, device=device)
    value = torch.randn(3, 1, 16, generator=torch.Generator().manual_seed(4)).to(device)
    value = (value * numbers(1e-3, 1.0, 1e4, device=device)[:, None, None]).to(dtype)
    cache.append(-value, value, torch.zeros_like(kinds))
    cache.flush(torch.ones_like(kinds, dtype=torch.bool), kinds, torch.zeros_like(kinds))
    result = module.decode_attention(torch.zeros(3, 4, 16, dtype=dtype, device=device), cache)
    assert_same(result.output, value.expand(3, 4, 16), what="output")


# The ablation --------------------------------------------------------------------------------------------------------


# In a quick run, some dtypes occur beside quantized types with only one of the combinations.
@pytest.mark.slow_on_cpu
@pytest.mark.parametrize(
    ("dtype", "formats"),
    [
        pytest.param(dtype, formats, id=f"{dtype}-{formats}", marks=(
            pytest.mark.property("state") if formats == WHOLE[0] and dtype == torch.float16 else ()
        ))
        for formats, quick in (
            (WHOLE[0], (torch.float32, *SHORT)), (WHOLE[1], (torch.float32, torch.float16)),
            ("fp8 unquantized ternary", (torch.bfloat16,)),
        )
        for dtype in (quick if is_quick() else (torch.float32, *SHORT))
    ],
)
def test_a_state_keeps_step_without_quantization(formats, dtype, twins, device):
    """In lockstep with float64, alone and beside types that are quantized."""
    config = {
        "budget": 8, "tau": 4, "group": 2, "block": 2, "retention": (2, 1), "max_tokens": 40,
        "formats": dict(zip("RET", formats.split(), strict=True)),
    }
    sizes = {"batch": 2, "query_heads": 4, "key_value_heads": 2, "head_dim": 17}
    both = lockstep.pair("thinkv", twins.optimized.thinkv, config=config, **sizes, dtype=dtype, device=device)
    generator = torch.Generator().manual_seed(6)

    def tokens(*time: int) -> list[Tensor]:
        return [torch.randn(2, heads, *time, 17, generator=generator).to(dtype).to(device) for heads in (4, 2, 2)]

    both.prefill(*tokens(7))
    for kind in (Thought.TRANSITION, Thought.EXECUTION, Thought.REASONING):
        for step in range(4):
            if step == 0:
                for state in (both.tested, both.reference):
                    state.thought = torch.full((2,), int(kind), device=device)
            both.step(*tokens())
    both.step(*tokens())
