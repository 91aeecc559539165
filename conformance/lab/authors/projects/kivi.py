"""KIVI: the quantizers of new_pack.py beside `kivi.quantize`, and the layer with its residuals beside `KIVIState`."""

from __future__ import annotations

from collections.abc import Iterator
from types import ModuleType, SimpleNamespace
from typing import Any, Union

import torch
from torch import Tensor

from .....reference.baselines import kivi
from ..checkout import Checkout, Project
from ..comparison import Comparison, Count, Outputs
from ..inputs import Unrotated, blocks, causal, hidden, layer, repeated, state, tokens, unrotated

BITS, GROUP, RESIDUAL, HEADS, HEAD_DIM = 2, 32, 64, 2, 64


def undocumented(*_: Any, **__: Any) -> Any:
    """transformers' decorators that add docstrings."""
    return lambda function: function


LLAMA = {
    "LlamaRotaryEmbedding": Unrotated, "apply_rotary_pos_emb": unrotated, "repeat_kv": repeated,
    "LlamaPreTrainedModel": object, "LlamaConfig": object, "Cache": object, "BaseModelOutputWithPast": object,
    "CausalLMOutputWithPast": object, "LLAMA_INPUTS_DOCSTRING": "", "Union": Union,
    "add_start_docstrings_to_model_forward": undocumented, "replace_return_docstrings": undocumented,
}


def compare(checkout: Checkout) -> Iterator[Comparison]:
    packing = checkout.load("quant.new_pack", bare=("quant",))
    for dtype in (torch.float32, torch.float64):
        yield quantizers(packing, dtype)
    yield in_half(packing)
    yield from residuals(checkout, packing)


def packed(packing: ModuleType, x: Tensor, bits: int, axis: int) -> tuple[Tensor, Tensor, Tensor]:
    """Words, scales and minima of the authors' function for keys (axis -2) or values (-1)."""
    function = packing.quant_and_pack_kcache if axis == -2 else packing.quant_and_pack_vcache
    codes, scale, minimum = function(x.clone(), GROUP, bits)
    return codes, scale.squeeze(axis), minimum.squeeze(axis)


def quantizers(packing: ModuleType, dtype: torch.dtype) -> Comparison:
    count = Count()
    for seed, bits in enumerate((2, 4)):
        x = tokens(seed, 128, heads=HEADS, head_dim=HEAD_DIM, batch=2, dtype=dtype)[1]
        for axis in (-2, -1):
            ours = kivi.quantize(x, bits=bits, axis=axis, group=GROUP)
            for one, other in zip(packed(packing, x, bits, axis), ours, strict=True):
                count.add(one, other)
    return Comparison(f"words, scales and minima, {str(dtype).removeprefix('torch.')}", "numbers", count)


def in_half(packing: ModuleType) -> Comparison:
    """float16, in which every operation of the authors' rounds."""
    plain, under = Count(), Count()
    for seed, bits in enumerate((2, 4)):
        x = tokens(seed, 512, heads=HEADS, head_dim=HEAD_DIM, dtype=torch.float16)[1]
        for axis in (-2, -1):
            theirs = packed(packing, x, bits, axis)
            rounded = kivi.codes_of_groups(
                x.unflatten(axis, (-1, GROUP)), axis, 2**bits - 1, scale_dtype=x.dtype, dtype=x.dtype
            )
            plain.add(theirs[0], kivi.quantize(x, bits=bits, axis=axis, group=GROUP).codes)
            under.add(theirs[0], kivi.pack(rounded[0], bits, axis))
    return Comparison(
        "words, float16", "numbers", plain, ("kivi.precision",), under, "every operation rounds to float16"
    )


def residuals(checkout: Checkout, packing: ModuleType) -> Iterator[Comparison]:
    """The layer, whose two GPU functions are replaced by the authors' own for the CPU."""
    def quantize(x: Tensor, group: int, bits: int) -> tuple[Tensor, ...]:
        codes, scale, minimum = packing.quant_and_pack_vcache(x.clone(), group, bits)
        return codes, scale.squeeze(-1), minimum.squeeze(-1)

    def product(_: int, x: Tensor, codes: Tensor, scale: Tensor, minimum: Tensor, bits: int) -> Tensor:
        code = packing.unpack_tensor(codes, bits, pack_dim=3).unflatten(-1, (-1, GROUP)).to(scale.dtype)
        return x @ (code * scale[..., None] + minimum[..., None]).flatten(-2)

    module = checkout.load("models.llama_kivi", stand_ins={
        "transformers.models.llama.modeling_llama": LLAMA, "quant": {},
        "quant.new_pack": {"triton_quantize_and_pack_along_last_dim": quantize},
        "quant.matmul": {"cuda_bmm_fA_qB_outer": product},
    })
    attention = layer(
        HEADS, HEADS, HEAD_DIM, config=SimpleNamespace(pretraining_tp=1), k_bits=BITS, v_bits=BITS, group_size=GROUP,
        residual_length=RESIDUAL,
    )
    quantized, words, outputs, steps = Count(), Count(), Outputs(), 70
    for seed, prompt in enumerate((150, 64, 5)):
        total = prompt + steps
        query, key, value = tokens(seed, total, heads=HEADS, head_dim=HEAD_DIM)
        config = kivi.KIVIConfig(BITS, BITS, GROUP, RESIDUAL, max_tokens=total)
        ours, past = state(kivi.KIVIState, config, query, key), None
        for first, end in blocks(prompt, steps):
            block = [tensor[:, :, first:end] for tensor in (query, key, value)]
            mask = None if first else causal(prompt)
            before = ours.key.clone(), ours.value.clone()
            output, _, past = module.LlamaAttention_KIVI.forward(
                attention, hidden(*block), mask, torch.arange(first, end)[None], past, use_cache=True
            )
            if first:
                for tensor, new in zip(before, block[1:], strict=True):
                    tensor[:, :, first:end] = new
                mine = ours.step(*(tensor[:, :, 0] for tensor in block))[:, :, None]
                outputs.add_attention(output.view(mine.shape), mine, block[0], *before, ours.occupied)
            else:
                ours.prefill(*block)
            add_cache(quantized, words if end in (prompt, total) else None, past, ours)
    yield Comparison(f"how many keys and values are quantized, a prompt and {steps} steps", "numbers", quantized)
    yield Comparison("words, scales and minima in the cache, after the prompt and at the end", "numbers", words)
    yield Comparison("outputs of steps", "numbers", outputs)


def add_cache(quantized: Count, words: Count | None, past: Any, ours: Any) -> None:
    """The authors' cache after a block, keys transposed, beside the state's."""
    of_keys, of_values = (past[0], past[2], past[3]), (past[4], past[6], past[7])
    keys = 0 if past[0] is None else past[0].shape[3] * 32 // BITS
    values = 0 if past[4] is None else past[4].shape[2]
    quantized.add(torch.tensor([keys, values]), torch.stack([ours.keys_quantized[0], ours.values_quantized[0]]))
    if words is not None and keys:
        for theirs, mine in zip(of_keys, ours.codes_of_keys(), strict=True):
            theirs = theirs.transpose(2, 3)
            words.add(theirs, mine[:, :, :theirs.shape[2]].to(theirs.dtype))
    if words is not None and values:
        for theirs, mine in zip(of_values, ours.codes_of_values(), strict=True):
            words.add(theirs, mine[:, :, :values].to(theirs.dtype))


PROJECT = Project(
    "https://github.com/jy-yuan/KIVI", "876b4d2d08e3b1d5f70d0969c299d8c7c42ddfb6",
    ("quant/new_pack.py", "models/llama_kivi.py"), compare,
)
