"""Checker of KIVI: codes that are bitwise equal, and the output of a step within the bound of reconstructed attention.

The reference computes in float64, and stores scales and minima in the type of the tested state, since codes depend on
it. No decision depends on rounding: what is quantized follows from the number of tokens.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor

from ....reference.baselines.kivi import dequantize, quantize
from ...cases import tiny
from ...cases.group_cases import EXTREME, KIVICase, KIVICodesCase, kivi_cases
from ..variants import ONE, Variant, variant
from . import quantized, quantizers
from .quantized import max_kept as max_kept

BUDGET, EVICTS, DECIDES, LOSSY, SCORED = None, False, False, True, False
#: Of traces: multiples of the groups, and of the codes in a word of 2 bits.
HEAD_DIMS = (16, 32, 64, 80, 96, 128, 160, 256)
SMALL: dict[str, Any] = {
    "key_bits": 4, "value_bits": 4, "group": 4, "residual": 4, "max_tokens": 160 if torch.cuda.is_available() else 24,
}
#: Two bits, in groups of more and of fewer codes than a word has.
GROUPINGS = ({"key_bits": 2, "value_bits": 2, "group": 16, "residual": 16}, {"key_bits": 2, "value_bits": 4})
LAWS = ({"key_bits": 2, "value_bits": 2},)
COMPILED = (
    {"key_bits": 4, "value_bits": 4, "group": 16, "residual": 128},
    {"key_bits": 2, "value_bits": 4, "group": 8, "residual": 16},
    {"key_bits": 4, "value_bits": 4, "group": 8, "residual": 8},  # the last one is what kernel_launches.py launches
)
#: The parser of the authors' code has "--k_bits 2 --v_bits 2"; the paper's experiments have G = 32 and R = 128.
DEFAULTS = {
    "key_bits": 2, "value_bits": 2, "group": 32, "residual": 128, "max_tokens": 32768, "scale": None,
}
FORMS = {"four_bits": {"key_bits": 4, "value_bits": 4}}
#: (key_bits, value_bits, group, residual) of traces. Each is compiled on a GPU.
COMBINATIONS = (
    ((2, 2, 16, 16), (4, 4, 8, 8), (2, 4, 8, 8), (4, 2, 4, 4), (4, 4, 1, 3)) if not torch.cuda.is_available() else
    ((2, 2, 16, 128), (4, 4, 16, 32), (2, 4, 8, 24), (4, 2, 16, 16))
)
CASES = (KIVICase, KIVICodesCase)
SUBJECTS = tuple(quantizers.subjects(
    kivi_cases, partial(kivi_cases, made=KIVICodesCase), extreme=EXTREME, passed=("bits", "axis", "group"),
))


def replay(case: Any, module: Any) -> Iterator[str]:
    """See the package."""
    yield from quantizers.replay(case, module)


#: bits of keys and values, group, residual, head_dim, query heads per KV head, dtype, tokens of the prompt. Groups of
#: 16-bit numbers in heads of 64 or 128 channels, up to several tiles of 128 tokens, have kernels of their own.
FRAGMENTS = (
    (2, 2, 32, 32, 128, 4, torch.bfloat16, 170), (4, 4, 32, 32, 128, 8, torch.bfloat16, 97),
    (2, 4, 16, 16, 64, 2, torch.bfloat16, 150), (4, 2, 16, 16, 128, 5, torch.float16, 85),
    (2, 2, 128, 128, 128, 1, torch.float16, 300), (4, 4, 128, 128, 128, 2, torch.float16, 270),
)


def _fragments(
    name: str, bits: Sequence[int], group: int, residual: int, head_dim: int, heads: int, **more: Any
) -> Variant:
    """A variant in bfloat16 of one row and one head unless `more` says otherwise. heads: per KV head."""
    options = {"key_bits": bits[0], "value_bits": bits[1], "group": group, "residual": residual}
    if "max_tokens" in more:
        options["max_tokens"] = more.pop("max_tokens")
    return variant(name, options, **ONE | {"dtype": torch.bfloat16, "head_dim": head_dim, "group": heads, **more})


THREE: dict[str, Any] = {"key_value_heads": 3, "content": "outliers"}
#: Large and small scales and minima, which a kernel may compute in another way.
EXTREMES = (
    _fragments("outliers-of-2-bits", (2, 2), 16, 16, 128, 2, **THREE, batch=2, prompt=60, steps=2, reorder_at=1),
    _fragments("outliers-of-4-bits", (4, 4), 32, 32, 128, 8, **THREE, prompt=154, steps=1),
    _fragments("outliers-in-steps", (4, 4), 8, 16, 64, 1, **THREE, prompt=15, steps=20),
    _fragments("outliers-in-groups-of-128", (4, 4), 128, 128, 128, 1, **THREE, prompt=140, steps=1),
    *(_fragments(f"steps-of-2-to-the-11-in-{bits}-bits", (bits, bits), 16, 16, 128, 1, content=f"steps_of_{bits}_bits",
                 key_value_heads=8, prompt=45, steps=1) for bits in (2, 4)),
)
#: Tiles that are full, or lack a token; groups of half a word of keys, and of one of the two words of values that lie
#: together; rooms that neither groups nor tiles divide.
EDGES = (
    _fragments("the-end-of-a-tile-of-2-bits", (2, 2), 16, 16, 128, 1, dtype=torch.float16, content="identical",
               prompt=142, steps=4),
    _fragments("the-end-of-a-tile-of-4-bits", (4, 4), 8, 8, 64, 1, dtype=torch.float16, content="identical", prompt=70,
               steps=4),
    _fragments("logits-of-several-tiles", (4, 4), 16, 16, 64, 2, dtype=torch.float16, content="overflow_88",
               key_value_heads=4, prompt=220, steps=2),
    _fragments("few-tokens-of-2-bits", (2, 2), 16, 16, 128, 8, dtype=torch.float16, prompt=40, steps=2),
    _fragments("values-in-groups-of-a-word", (4, 4), 8, 8, 128, 2, prompt=40, steps=2),
    _fragments("keys-in-groups-of-half-a-word", (2, 4), 8, 8, 64, 2, prompt=40, steps=2),
    _fragments("a-residual-of-several-tiles", (4, 4), 16, 144, 64, 1, max_tokens=165, prompt=142, steps=3),
    _fragments("the-largest-values", (4, 4), 16, 32, 64, 2, dtype=torch.float16, content="largest_values", prompt=20,
               steps=1),
    _fragments("after-a-reset", (4, 4), 32, 32, 128, 1, batch=2, padding="stairs", after_reset=True, prompt=170,
               steps=1),
)
VARIANTS = (
    *EXTREMES, *EDGES,
    *(_fragments(f"fragments-of-{bits[0]}-and-{bits[1]}-bits-in-groups-of-{group}", bits, group, residual, head_dim,
                 heads, dtype=dtype, prompt=prompt, steps=2, long=prompt > 200)
      for *bits, group, residual, head_dim, heads, dtype, prompt in FRAGMENTS),
    variant("two-bits", {"key_bits": 2, "value_bits": 2, "group": 16, "residual": 16}, prompt=30),
    variant("two-and-four-bits", {"key_bits": 2, "value_bits": 4, "group": 8, "residual": 8}, padding="random"),
    variant("groups-of-one", {"group": 1, "residual": 3}, steps=9, padding="random"),
    variant("several-groups", {"key_bits": 4, "value_bits": 2, "group": 4, "residual": 4}, prompt=21, steps=12),
)


def configs(most: int, window: int) -> st.SearchStrategy[dict[str, Any]]:
    """Short residuals, so that keys are quantized several times; max_tokens covers the longest trace."""
    names = ("key_bits", "value_bits", "group", "residual")
    return st.sampled_from(COMBINATIONS).map(
        lambda chosen: {
            **dict(zip(names, chosen, strict=True)), "max_tokens": 400 if torch.cuda.is_available() else 36
        }
    )


def bytes_of(state: Any) -> int:
    """The bytes of codes, scales and minima, and of the unquantized keys and values, of all tokens."""
    config, (_, _, heads, _, head_dim), item = state.config, state.sizes, state.dtype.itemsize
    tokens = int(state.occupied.sum())
    total = 0.0
    for bits, packed in ((config.key_bits, state.keys_quantized), (config.value_bits, state.values_quantized)):
        count = int(packed.sum())
        total += heads * head_dim * (count * (bits / 8 + 2 * item / config.group) + (tokens - count) * item)
    return int(total)


def poison(state: Any) -> None:
    """Overwrite all free memory of one of our states: NaN, and codes of 1 bits. Does nothing for other states."""
    if hasattr(state, "_keys"):
        count = state._count[:, None]
        for buffer, packed in ((state._keys, state.keys_quantized), (state._values, state.values_quantized)):
            place = torch.arange(buffer.shape[2], device=buffer.device)
            newest = count - 1 - (count - 1 - place) % buffer.shape[2]         # the last token of each place
            buffer.masked_fill_((newest < packed[:, None])[:, None, :, None], torch.nan)
        for (codes, *scales), packed, each in (
            (state._key_parts, state.keys_quantized, state.config.group),
            (state._value_parts, state.values_quantized, 1),
        ):
            groups = scales[0].shape[2] * scales[0].shape[3]
            for part, filling in ((codes, -1), *((scale, torch.nan) for scale in scales)):
                rows = part.shape[2] * part.shape[3]
                group = torch.arange(rows, device=part.device) // (rows // groups)
                free = (group * each >= packed[:, None]).view(len(packed), 1, *part.shape[2:4])
                part.masked_fill_(free[(...,) + (None,) * (part.dim() - 4)], filling)
        for scratch in (state._partial, state._row_maxima, state._weight_sums):
            scratch.fill_(torch.nan)
    else:
        quantized.poison_reference(state)


class Adapter(quantized.Adapter):
    """The lockstep adapter; the module's docstring describes its checks."""

    exact = ("keys_quantized", "values_quantized")

    def reads(self, state: Any) -> Iterator[quantized.Read]:
        config, slots = state.config, state.sizes.slots
        for found, axis, bits, count in (
            (state.codes_of_keys(), -2, config.key_bits, state.keys_quantized),
            (state.codes_of_values(), -1, config.value_bits, state.values_quantized),
        ):
            codes, scale, minimum = found
            exact = dequantize(codes, scale.double(), minimum.double(), bits=bits, axis=axis, group=config.group)
            packed = torch.arange(slots, device=exact.device) < count[:, None]
            each = minimum.double().repeat_interleave(config.group, axis)
            yield quantized.Read(exact, each, packed)


def read_by(state: Any, rows: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """See `quantized.read_by`."""
    return quantized.read_by(Adapter(), state, rows)


def arguments(device: torch.device) -> dict[str, Any]:
    """See the package."""
    shape = (tiny.BATCH, tiny.KEY_VALUE_HEADS, 8, tiny.HEAD_DIM)
    x = torch.randn(shape, generator=torch.Generator().manual_seed(7)).to(device)
    options: dict[str, Any] = {"bits": 4, "axis": -2, "group": 4}
    return {"x": x, **options, "dtype": torch.float16, **quantize(x, **options)._asdict()}


def variants(name: str, given: dict[str, Any]) -> list[dict[str, Any]]:
    """See the package: values, in 2 bits."""
    options: dict[str, Any] = {"bits": 2, "axis": -1, "group": 8}
    if name == "quantize":
        return [given | options]
    x = torch.randn(2, 2, 3, 16, generator=torch.Generator().manual_seed(8)).to(given["codes"].device)
    return [given | quantize(x, **options)._asdict() | options]
