"""ThinKV without quantization, as in the ablations "w/o TBQ" (table 2) and "TBE" (table 3): the format "unquantized" on
both sides. Its error is 0, so everything that is stored comes back bit by bit.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from kvtwin.conformance.cases.draws import is_quick
from kvtwin.conformance.cases.layouts import lay_out
from kvtwin.conformance.cases.paged_cases import WHOLE, empty, leave, numbers, put
from kvtwin.conformance.judge import lockstep
from kvtwin.conformance.judge.compare import assert_same
from kvtwin.reference.contract.thinkv.config import ThinKVConfig
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


@SIDES
def test_numbers_are_rounded_only_to_another_dtype(side, twins, device):
    """float64 becomes float32, as in all formats. `dequantize` rounds to the dtype that is asked for."""
    module = getattr(twins, side).thinkv
    x = torch.tensor([[1.0, 1 + 2**-30, -0.0, 1e300, 3.14159265358979]], dtype=torch.float64, device=device)
    q = module.quantize(x, "unquantized", axis=-1)
    assert_same(bits(q.codes), bits(x.float()), what="codes")
    for dtype in SHORT:
        assert_same(bits(module.dequantize(q, dtype)), bits(x.float().to(dtype)), what=f"as {dtype}")
    assert module.dequantize(q, torch.float64).tolist() == x.float().double().tolist()


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


@SIDES
def test_16_bits_by_hand(side, twins, device):
    """A full cache takes 16 bits per element, with float32 32 bits, and no scales. Blocks of quantized tokens have
    their own size."""
    for dtype, size in ((torch.float16, 2), (torch.bfloat16, 2), (torch.float32, 4)):
        cache = empty(getattr(twins, side).thinkv, device, batch=2, heads=2, dtype=dtype,
                      formats="unquantized nvfp4 unquantized", tokens=16)
        nothing = cache.bytes_allocated()
        put(cache, 0, 4, thought=2)
        assert cache.bits_per_element() == 8 * size
        assert cache.bytes_allocated() == nothing + 2 * 4 * 2 * 2 * 16 * size          # rows; tokens; heads; K, V; D
        put(cache, 4, 1, thought=0)
        block = 2 * 2 * 2 * 2 * 16 * size                                              # rows; slots; heads; K, V; D
        assert cache.bytes_allocated() == nothing + 3 * block
        put(cache, 5, 2, thought=1)
        nvfp4 = 2 * 2 * (2 * (8 + 8) + 2 * 4 + 16)                          # rows; heads; codes, scales of V and of K
        assert cache.bytes_allocated() == nothing + 3 * block + nvfp4
    cache = empty(getattr(twins, side).thinkv, device, dtype=torch.float16, formats=WHOLE[0], head_dim=17)
    put(cache, 0, 2, thought=2)
    assert cache.bits_per_element() == 18 * 16 / 17, "a token takes whole words of 4 bytes"


# The ablation --------------------------------------------------------------------------------------------------------


@SIDES
@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16), ids=str)
def test_eviction_alone_keeps_tokens_as_they_are(dtype, side, twins, device):
    """"TBE": segments shrink at a transition and at the budget, and the tokens that stay are those that came."""
    config = ThinKVConfig(
        12, tau=4, group=2, block=2, retention=(2, 1), max_tokens=40, formats=dict.fromkeys("RET", "unquantized")
    )
    sizes = {"batch": 2, "query_heads": 2, "key_value_heads": 1, "head_dim": 16}
    state = getattr(twins, side).thinkv.ThinKVState(config, dtype=dtype, device=device, **sizes)
    generator = torch.Generator().manual_seed(3)
    came = torch.randn(2, 2, 1, 25, 16, generator=generator).to(dtype).to(device)      # K, V; rows; heads; tokens; D
    query = torch.randn(2, 2, 25, 16, generator=generator).to(dtype).to(device)
    state.prefill(query[:, :, :9], came[0][:, :, :9], came[1][:, :, :9])
    for step in range(9, 25):
        if step in (9, 13):
            state.thought = torch.full((2,), int(Thought.TRANSITION if step == 9 else Thought.EXECUTION), device=device)
        state.step(query[:, :, step], came[0][:, :, step], came[1][:, :, step])
    assert int(state.occupied.sum(1).max()) <= 12 < 25
    for row in range(2):
        held = state.positions[row]
        slots = (held >= 0).nonzero()[:, 0]
        for name, stored, given in zip(("key", "value"), (state.key, state.value), came, strict=True):
            assert_same(bits(stored[row][:, slots]), bits(given[row][:, held[slots]].float()), what=name)


@SIDES
def test_quantization_alone_evicts_nothing(side, twins, device):
    """The ablation "TBQ": with a minimum of a whole segment and a budget for all tokens, transitions evict nothing."""
    config = ThinKVConfig(20, tau=4, group=2, block=2, retention=(4,), max_tokens=20)
    state = getattr(twins, side).thinkv.ThinKVState(
        config, batch=1, query_heads=2, key_value_heads=1, head_dim=16, dtype=torch.float32, device=device
    )
    state.prefill(*(torch.ones(1, heads, 9, 16, device=device) for heads in (2, 1, 1)))
    state.thought = torch.zeros_like(state.thought)
    for _ in range(11):
        state.step(*(torch.ones(1, heads, 16, device=device) for heads in (2, 1, 1)))
    assert sorted(state.positions[0].tolist())[-20:] == list(range(20))
    assert state.cache.bits_per_element() < 16


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
