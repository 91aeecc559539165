"""PM-KVQ: quantizer, shrinking and `ProgressiveQuantizedCache` beside `pm_kvq`."""

from __future__ import annotations

from collections.abc import Iterator
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from .....reference.baselines import pm_kvq
from ..checkout import Checkout, Project
from ..comparison import Comparison, Count
from ..inputs import blocks, state, tokens

PROGRESSIVE = "pm_kvq.quantization.methods.pm_kvq.progressive"
PACKAGES = (
    "pm_kvq", "pm_kvq.quantization", "pm_kvq.quantization.methods", "pm_kvq.quantization.methods.pm_kvq", PROGRESSIVE,
    "pm_kvq.quantization.quantizer",
)
HEADS, HEAD_DIM, SINKS, WINDOW, MEGABYTE = 2, 128, 1, 16, 2**20


def compare(checkout: Checkout) -> Iterator[Comparison]:
    module = checkout.load(f"{PROGRESSIVE}.progressive_quantized_cache", bare=PACKAGES, stand_ins={"transformers": {}})
    yield shrinking(module)
    yield from quantizer(module)
    yield from caches(module)


def shrinking(module: ModuleType) -> Comparison:
    """Every code of 16, 8 and 4 bits."""
    count = Count()
    for bits in (16, 8, 4):
        codes, scale = torch.arange(2**bits).view(1, 1, -1, 16), torch.rand(1, 1, 2**bits // 16, 1)
        words = module.pack_funcs[bits](codes)
        shrunk, scales, _ = module.ProgressiveQuantizedCache.bit_width_shrinking(words, scale.clone(), None, bits)
        ours = pm_kvq.shrink(codes.to(torch.int32), scale, bits=bits)
        count.add(unpacked(module, shrunk, bits // 2), ours.codes)
        count.add(scales, ours.scale)
    return Comparison("codes of all values, and scales, after shrinking", "numbers", count)


def unpacked(module: ModuleType, words: Tensor, bits: int) -> Tensor:
    return module.unpack_funcs[bits](words).to(torch.int32) & 2**bits - 1


def quantizer(module: ModuleType) -> Iterator[Comparison]:
    """Codes of 16 bits, of ordinary and of narrow groups: a scale of the authors' is at least 1e-5."""
    plain, under = Count(), Count()
    for seed, size in enumerate((1.0, 0.3, 1e-2)):
        x = size * tokens(seed, 64, heads=HEADS, head_dim=HEAD_DIM, dtype=torch.float32)[1]
        quantize = module.UntrainableQuantizer(16, "per_group", False, 128, pack=True, round_zeros=False)
        words, scale, zero = quantize.real_quant(x, return_params=True)
        theirs = unpacked(module, words, 16), scale, -zero
        for count, least in ((plain, 0.0), (under, 1e-5)):
            for one, other in zip(theirs, pm_kvq.quantize(x, bits=16, group=128, least_scale=least), strict=True):
                count.add(one, other)
    yield Comparison(
        "codes of 16 bits, scales and minima, float32", "numbers", plain, ("pm_kvq.clamp",), under, "least_scale=1e-5"
    )


def caches(module: ModuleType) -> Iterator[Comparison]:
    """A cache that decodes from its first full window on, and caches with longer prompts."""
    steps, numbers, plain, under = Count(), Count(), Count(), Count()
    run(module, SINKS + WINDOW, steps, numbers=numbers)
    yield Comparison("width of the codes after each step, the same budget in bytes", "decisions", steps)
    yield Comparison("keys and values that the next step reads, whenever codes changed", "numbers", numbers)
    for prompt in (40, 90, 120, 130, 140, 150, 160, 170):
        run(module, prompt, plain)
        run(module, prompt, under, prompt_in_steps=True)
    yield Comparison(
        "width of the codes after a prompt and each step", "decisions", plain, ("pm_kvq.shrinks",), under,
        "the prompt token by token",
    )


def run(
    module: ModuleType, prompt: int, widths: Count, *, numbers: Count | None = None, prompt_in_steps: bool = False
) -> None:
    """A prompt, and steps until there are 200 tokens."""
    total = 200
    query, key, value = tokens(prompt, total, heads=HEADS, head_dim=HEAD_DIM, dtype=torch.float32)
    config = pm_kvq.PMKVQConfig(4, window=WINDOW, sinks=SINKS, least_scale=1e-5, max_tokens=total)
    ours: Any = state(pm_kvq.PMKVQState, config, query, key)
    theirs = module.ProgressiveQuantizedCache(SimpleNamespace(
        kv_budgets=[ours.budget_bytes / MEGABYTE], n_sink_token=SINKS, n_sink_token_bits=16, n_window_token=WINDOW,
        n_window_token_bits=16, n_init_kv_bits=16,
    ))
    ours.prefill(*(tensor[:, :, :prompt] for tensor in (query, key, value)))
    # The authors' cache cannot be read before a window is full.
    full = SINKS + WINDOW if prompt_in_steps else prompt
    for first, end in blocks(full, prompt - full):
        theirs.update(key[:, :, first:end], value[:, :, first:end], 0)
    last = None
    for at in range(prompt, total + 1):
        widths.add(torch.tensor(theirs.n_kv_bits), torch.tensor([ours.width]))
        count = int(ours.tokens_quantized[0])
        if numbers is not None and last != (count, ours.width):
            # Of the sinks and the window, the authors store 16-bit codes, ours the numbers themselves.
            coded = slice(SINKS, SINKS + count)
            for one, other in zip(theirs.dequantize(0, "cpu"), (ours.key, ours.value), strict=True):
                numbers.add(one[:, :, coded], other[:, :, coded].to(torch.bfloat16))
            last = count, ours.width
        if at < total:
            theirs.update(key[:, :, at:at + 1], value[:, :, at:at + 1], 0)
            ours.step(query[:, :, at], key[:, :, at], value[:, :, at])


PROJECT = Project(
    "https://github.com/thu-nics/PM-KVQ", "c8a2bff80628a3c476c057aa42e13d5e5c55196f",
    (
        "pm_kvq/quantization/methods/pm_kvq/progressive/progressive_quantized_cache.py",
        "pm_kvq/quantization/quantizer/quantizer.py",
    ),
    compare,
)
