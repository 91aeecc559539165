"""Checker of PM-KVQ: codes that are bitwise equal in every width, and the output of a step within the bound of
reconstructed attention. See quantized.py."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor

from ....reference.baselines.pm_kvq import dequantize, quantize, shrink
from ....reference.contract.pm_kvq import WIDTHS, scale_dtype
from ...cases import tiny
from ...cases.group_cases import PM_KVQ_EXTREME, PMKVQCase, PMKVQCodesCase, pm_kvq_cases
from ..bounds import FLUSH, SLACK, UNIT
from ..choices import Verdict
from ..compare import fail
from ..fields import field
from ..subjects import Subject
from ..variants import variant
from . import quantized, quantizers
from .quantized import max_kept as max_kept

BUDGET, EVICTS, DECIDES, LOSSY, SCORED = None, False, False, True, False
GPU = torch.cuda.is_available()
#: Of traces: even, and multiples of the groups or less than them.
HEAD_DIMS = (16, 32, 64, 80, 96, 128, 256)
#: All widths within 24 tokens (16, 8, 4 and 2 bits from token 1, 8, 12 and 20 on); on a GPU, within 160.
SMALL: dict[str, Any] = {
    "bits": 2.5 if GPU else 5, "window": 4, "sinks": 1, "group": 8, "max_tokens": 160 if GPU else 24
}
#: A head is one group; no sinks, and a window that is no power of two.
GROUPINGS = ({"group": 128}, {"bits": 4, "window": 3, "sinks": 0})
LAWS = ({"bits": 4, "window": 3, "sinks": 0},)
COMPILED = ({"bits": 4, "window": 128, "sinks": 1, "group": 16, "max_tokens": 4096}, {"group": 128})
#: Sinks and window of the paper and the authors' code, whose example has budgets of 4 and 2 bits.
DEFAULTS = {
    "bits": 4, "window": 128, "sinks": 1, "group": 128, "least_scale": 0.0, "max_tokens": 32768, "scale": None,
}
AUTHORS = {"least_scale": 1e-5}
#: (bits, window, sinks, group) of traces, which reach 2, 2, 8, 16 and 4 bits, on a GPU 2, 2, 4 and 8.
COMBINATIONS = (
    ((4, 4, 1, 8), (3.5, 3, 0, 16), (9, 5, 2, 128), (16, 4, 1, 4), (5, 1, 1, 128)) if not GPU else
    ((2.75, 16, 1, 16), (6.4, 128, 1, 128), (4.5, 24, 0, 8), (9, 32, 4, 128))
)


VARIANTS = (*(
    variant(
        f"bits-{bits}-window-{window}-sinks-{sinks}-group-{group}",
        {"bits": bits, "window": window, "sinks": sinks, "group": group, "max_tokens": 36}, prompt=prompt, steps=12,
        padding="random" if prompt % 2 else "stairs",
    )
    for (bits, window, sinks, group), prompt in zip(
        ((4, 4, 1, 8), (3.5, 3, 0, 16), (9, 5, 2, 128), (16, 4, 1, 4), (5, 1, 1, 128)), (14, 21, 14, 15, 20),
        strict=True,
    )
), variant("prompt-of-one-window", {"bits": 5, "window": 4, "sinks": 1, "group": 8}, prompt=5, padding="none", steps=4))


def judge_shrunk(result: Any, case: PMKVQCodesCase) -> None:
    """result: what `shrink(**case.shrink_inputs)` returns. Codes follow in integers; the new scale is one product."""
    codes, scale = result
    given, factor = case.tensor("scale").double(), 2 ** (case.bits // 2) + 1
    with field("codes"):
        quantizers.assert_same_codes(codes, shrink(case.tensor("codes"), case.tensor("scale"), bits=case.bits).codes)
    with field("scale"):
        error = (UNIT * given * factor + FLUSH).masked_fill(given == 0, 0) * SLACK
        right = quantizers.rounded(given * factor, error, case.scale_dtype)
        quantizers.assert_rounded(scale, right, case.scale_dtype, what="scale")


CASES = (PMKVQCase, PMKVQCodesCase)
_shrinks = partial(pm_kvq_cases, made=PMKVQCodesCase, widths=WIDTHS[:-1])
SUBJECTS = (
    *quantizers.subjects(pm_kvq_cases, partial(pm_kvq_cases, made=PMKVQCodesCase), extreme=PM_KVQ_EXTREME),
    Subject(
        "shrink", _shrinks, judge_shrunk, numbers=("scale",), choices=("codes",), sized="tokens",
        inputs=lambda case: case.shrink_inputs,
        properties=quantizers.kinds(quantizers.NEAR, tied=False, extreme=PM_KVQ_EXTREME),
    ),
)


def replay(case: Any, module: Any) -> Iterator[str]:
    """See the package."""
    yield from quantizers.replay(case, module)


def configs(most: int, window: int) -> st.SearchStrategy[dict[str, Any]]:
    """Short windows, so that tokens are quantized several times; max_tokens covers the longest trace."""
    names = ("bits", "window", "sinks", "group")
    return st.sampled_from(COMBINATIONS).map(
        lambda chosen: {**dict(zip(names, chosen, strict=True)), "max_tokens": 400 if GPU else 36}
    )


def bytes_of(state: Any) -> int:
    """The bytes of codes, scales and minima, and of the unquantized keys and values, of all tokens."""
    (_, _, heads, _, head_dim), item = state.sizes, state.dtype.itemsize
    groups = state.codes_of_keys().scale.shape[-1]
    packed, tokens = int(state.tokens_quantized.sum()), int(state.occupied.sum())
    of_groups = groups * (item + scale_dtype(state.dtype).itemsize)
    return 2 * heads * (packed * (head_dim * state.width // 8 + of_groups) + (tokens - packed) * head_dim * item)


def poison(state: Any) -> None:
    """Overwrite all free memory of one of our states: NaN, and fields of 1 bits. Does nothing for other states."""
    if not hasattr(state, "_key_words"):
        quantized.poison_reference(state)
        return
    words, packed, width = state._key_words, state.tokens_quantized[:, None], state.width
    unit = torch.arange(words.shape[2], device=words.device)
    kept = torch.zeros(len(packed), len(unit), dtype=torch.int64, device=words.device)
    for place in range(16 // width):
        start = (place & 1) * 8 + (place & 2) * 2 + (place & 4) // 2
        ones = ((1 << width) - 1) << start
        kept |= torch.where(unit + place * len(unit) < packed, ones | ones << 16, 0)
    free = (~kept & 0xFFFFFFFF)[:, None, :, None]
    for one in (state._key_words, state._value_words):
        one |= torch.where(free >= 2**31, free - 2**32, free).to(torch.int32)
    token = torch.arange(state._key_scale.shape[2], device=words.device)
    for one in (state._key_scale, state._key_minimum, state._value_scale, state._value_minimum):
        one.masked_fill_((token >= packed)[:, None, :, None], torch.nan)
    slot = torch.arange(state._keys.shape[2], device=words.device)
    for one in (state._keys, state._values):
        one.masked_fill_((slot >= state._count[:, None] - packed)[:, None, :, None], torch.nan)
    for scratch in (state._partial, state._row_maxima, state._weight_sums):
        scratch.fill_(torch.nan)


class Adapter(quantized.Adapter):
    """The lockstep adapter; the module's docstring describes its checks."""

    exact = ("tokens_quantized",)

    def dtype_of(self, part: str) -> torch.dtype:
        return scale_dtype(self.dtype) if part == "scale" else self.dtype

    def reads(self, state: Any) -> Iterator[quantized.Read]:
        token = torch.arange(state.sizes.slots, device=state.positions.device) - state.config.sinks
        packed = (token >= 0) & (token < state.tokens_quantized[:, None])
        for codes, scale, minimum in (state.codes_of_keys(), state.codes_of_values()):
            each = minimum.double().repeat_interleave(codes.shape[-1] // minimum.shape[-1], -1)
            yield quantized.Read(dequantize(codes, scale.double(), minimum.double()), each, packed)

    def after_prompt(self, tested: Any, reference: Any, prompt: dict[str, Tensor]) -> Verdict | None:
        self._same_width(tested, reference)
        return super().after_prompt(tested, reference, prompt)

    def after_step(self, tested: Any, reference: Any, query: Tensor) -> tuple[Tensor, Verdict | None]:
        self._same_width(tested, reference)
        return super().after_step(tested, reference, query)

    def _same_width(self, tested: Any, reference: Any) -> None:
        if tested.width != reference.width:
            fail(f"width: expected {reference.width}, got {tested.width}")


def read_by(state: Any, rows: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """See `quantized.read_by`."""
    return quantized.read_by(Adapter(), state, rows)


def arguments(device: torch.device) -> dict[str, Any]:
    """See the package."""
    shape = (tiny.BATCH, tiny.KEY_VALUE_HEADS, 8, tiny.HEAD_DIM)
    x = torch.randn(shape, generator=torch.Generator().manual_seed(7)).to(device)
    options: dict[str, Any] = {"bits": 16, "group": 4}
    return {"x": x, **options, "least_scale": 1e-4, "dtype": torch.float16, **quantize(x, **options)._asdict()}


def variants(name: str, given: dict[str, Any]) -> list[dict[str, Any]]:
    """See the package: codes of 8 bits, in one group for each token."""
    options: dict[str, Any] = {"bits": 8, "group": 128}
    if name == "quantize":
        return [given | options]
    x = torch.randn(2, 2, 3, 16, generator=torch.Generator().manual_seed(8)).to(given["codes"].device)
    codes, scale, minimum = quantize(x, **options)
    more = {"codes": codes, "scale": scale}
    return [given | more | ({"bits": 8} if name == "shrink" else {"minimum": minimum})]
