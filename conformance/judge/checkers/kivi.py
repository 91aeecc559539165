"""Checker of KIVI: codes that are bitwise equal, and the output of a step within the bound of reconstructed attention.

The reference computes in float64, and stores scales and minima in the type of the tested state, since codes depend on
it. No decision depends on rounding: what is quantized follows from the number of tokens.
"""

from __future__ import annotations

from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor

from ....reference.baselines.kivi import dequantize, quantize
from ...cases import tiny
from .. import lockstep, reconstructed
from ..compare import Mismatch, Verdict, assert_dtype, assert_same

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


def configs(most: int, window: int) -> st.SearchStrategy[dict[str, Any]]:
    """Short residuals, so that keys are quantized several times; max_tokens covers the longest trace."""
    names = ("key_bits", "value_bits", "group", "residual")
    return st.sampled_from(COMBINATIONS).map(
        lambda chosen: {
            **dict(zip(names, chosen, strict=True)), "max_tokens": 400 if torch.cuda.is_available() else 36
        }
    )


def max_kept(state: Any, tokens: int) -> int:
    """All tokens: KIVI evicts none."""
    return tokens


def bytes_of(state: Any) -> int:
    """The bytes of codes, scales and minima, and of the unquantized keys and values, of all tokens."""
    config, (_, _, heads, _, head_dim), item = state.config, state.sizes, state.dtype.itemsize
    tokens = int(state.occupied.sum())
    total = 0.0
    for bits, quantized in ((config.key_bits, state.keys_quantized), (config.value_bits, state.values_quantized)):
        count = int(quantized.sum())
        total += heads * head_dim * (count * (bits / 8 + 2 * item / config.group) + (tokens - count) * item)
    return int(total)


def poison(state: Any) -> None:
    """Overwrite all free memory of one of our states: NaN, and codes of 1 bits. Does nothing for other states."""
    if hasattr(state, "_keys"):
        count = state._count[:, None]
        for buffer, quantized in ((state._keys, state.keys_quantized), (state._values, state.values_quantized)):
            place = torch.arange(buffer.shape[2], device=buffer.device)
            newest = count - 1 - (count - 1 - place) % buffer.shape[2]         # the last token of each place
            buffer.masked_fill_((newest < quantized[:, None])[:, None, :, None], torch.nan)
        for names, quantized, each in (
            ("key", state.keys_quantized, state.config.group), ("value", state.values_quantized, 1)
        ):
            codes, *scales = (getattr(state, f"_{names}_{part}") for part in ("codes", "scale", "minimum"))
            for part, filling in ((codes, -1), *((scale, torch.nan) for scale in scales)):
                group = torch.arange(part.shape[2], device=part.device) // (part.shape[2] // scales[0].shape[2])
                part.masked_fill_((group * each >= quantized[:, None])[:, None, :, None], filling)
        for scratch in (state._partial, state._row_maxima, state._weight_sums):
            scratch.fill_(torch.nan)
    elif hasattr(state, "_key") and isinstance(state._key, Tensor):
        free = ~state.occupied[:, None, :, None]
        state._key.masked_fill_(free, torch.nan)
        state._value.masked_fill_(free, torch.inf)


def expanded(minimum: Tensor, axis: int, group: int, slots: int) -> Tensor:
    """The minimum of each element of the first slots, 0 for slots beyond: [B, Hkv, slots, D] float64."""
    each = minimum.double().repeat_interleave(group, axis)[:, :, :slots]
    return torch.nn.functional.pad(each, (0, 0, 0, slots - each.shape[2]))


def read_by(state: Any, rows: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """What a step of the first rows reads: keys and values [rows, Hkv, S, D] float64, the numbers that the codes stand
    for, and the errors of their elements, 0 for unquantized tokens."""
    config, slots = state.config, state.sizes.slots
    numbers: list[Tensor] = []
    errors: list[Tensor] = []
    for found, whole, axis, bits, quantized in (
        (state.codes_of_keys(), state.key, -2, config.key_bits, state.keys_quantized),
        (state.codes_of_values(), state.value, -1, config.value_bits, state.values_quantized),
    ):
        codes, scale, minimum = (part[:rows] for part in found)
        exact = dequantize(codes, scale.double(), minimum.double(), bits=bits, axis=axis, group=config.group)
        exact = torch.nn.functional.pad(exact[:, :, :slots], (0, 0, 0, max(0, slots - exact.shape[2])))
        packed = (torch.arange(slots, device=exact.device) < quantized[:rows, None])[:, None, :, None]
        numbers.append(exact.where(packed, whole[:rows].double()))
        error = reconstructed.element_error(exact, expanded(minimum, axis, config.group, slots), state.dtype)
        errors.append(error.masked_fill(~packed, 0))
    return numbers[0], numbers[1], errors[0], errors[1]


class Adapter(lockstep.Adapter):
    """The lockstep adapter; the module's docstring describes its checks."""

    stored = ()
    exact = ("keys_quantized", "values_quantized")

    def attach(self, tested: Any, reference: Any) -> None:
        reference._stored = self.dtype = tested.dtype if hasattr(tested, "dtype") else tested.key.dtype
        quantize_until = reference._quantize_until

        def watched(count: Tensor) -> None:
            self._snapshot(reference, count)
            quantize_until(count)

        reference._quantize_until = watched

    def _snapshot(self, reference: Any, count: Tensor) -> None:
        """Copy what a step attends to, before the reference quantizes. Adds the error of each element."""
        slots = int(count.max())
        config, self.occupied = reference.config, reference.occupied[:, :slots].clone()
        self.tokens: list[Tensor] = []
        self.errors: list[Tensor] = []
        for one, found, axis, quantized in (
            (reference._key, reference.codes_of_keys(), -2, reference.keys_quantized),
            (reference._value, reference.codes_of_values(), -1, reference.values_quantized),
        ):
            tokens = one[:, :, :slots].clone()
            packed = (torch.arange(slots, device=tokens.device) < quantized[:, None])[:, None, :, None]
            minimum = expanded(found.minimum, axis, config.group, slots)
            error = reconstructed.element_error(tokens, minimum, self.dtype)
            self.tokens.append(tokens)
            self.errors.append(error.masked_fill(~packed, 0))

    def after_prompt(self, tested: Any, reference: Any, prompt: dict[str, Tensor]) -> Verdict | None:
        self._same_codes(tested, reference)
        return None

    def after_step(self, tested: Any, reference: Any, query: Tensor) -> tuple[Tensor, Verdict | None]:
        self._same_codes(tested, reference)
        (key, value), (key_error, value_error) = self.tokens, self.errors
        self.bound = reconstructed.decode_output(
            query, key, value, self.occupied, key_error, value_error, scale=lockstep.scale_of(reference)
        )
        return self.bound, None

    def _same_codes(self, tested: Any, reference: Any) -> None:
        """Codes, scales and minima are bitwise equal, and keys and values are the numbers that they stand for."""
        try:
            for name in ("codes_of_keys", "codes_of_values"):
                found, expected = getattr(tested, name)(), getattr(reference, name)()
                for part, one, other in zip(expected._fields, found, expected, strict=True):
                    assert_same(one, other, what=f"{name}().{part}")
                    if part != "codes":
                        assert_dtype(one, self.dtype, what=f"{name}().{part}")
        except Mismatch as error:
            error.of_state = True
            raise


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
