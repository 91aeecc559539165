"""ThinKV without quantization, as in the ablations "w/o TBQ" (table 2) and "TBE" (table 3): the format "unquantized"
on both sides. Its error is 0, so everything that is stored comes back bit by bit: what only our own sides promise.
"""

from __future__ import annotations

import pytest
import torch

from kvtwin.conformance.cases.paged_cases import WHOLE, empty, put
from kvtwin.conformance.judge.compare import assert_same
from kvtwin.conformance.suite.thinkv.test_thinkv_unquantized import SHORT, SIDES, bits
from kvtwin.reference.contract.thinkv.config import ThinKVConfig
from kvtwin.reference.contract.thinkv.types import Thought

pytestmark = pytest.mark.kind("equivalence")


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
