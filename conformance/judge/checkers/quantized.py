"""What the checkers of quantizing states share: the adapter of lockstep, and the numbers that a step reads.

The reference computes in float64, and stores scales and minima in the types of the tested state, since codes depend on
them. No decision depends on rounding: what is quantized follows from the number of tokens.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from .. import lockstep, reconstructed
from ..choices import Verdict
from ..compare import Mismatch, assert_dtype, assert_same


class Read(NamedTuple):
    """The keys or the values of a state: what its codes stand for, exactly, and its minima, for each element
    [B, Hkv, S, D] float64, with anything in slots that are not `packed` [B, S]."""

    exact: Tensor
    minimum: Tensor
    packed: Tensor

    def first(self, slots: int) -> Read:
        """The first slots, with zeros beyond the end."""
        return Read(fitted(self.exact, slots), fitted(self.minimum, slots), self.packed[:, :slots])


def max_kept(state: Any, tokens: int) -> int:
    """All tokens: a quantizing state evicts none."""
    return tokens


def poison_reference(state: Any) -> None:
    """Overwrite the free slots of one of our reference states."""
    if hasattr(state, "_key") and isinstance(state._key, Tensor):
        free = ~state.occupied[:, None, :, None]
        state._key.masked_fill_(free, torch.nan)
        state._value.masked_fill_(free, torch.inf)


def fitted(tensor: Tensor, slots: int) -> Tensor:
    """The first slots of a tensor [B, Hkv, any, D], with zeros for slots beyond its end."""
    return pad(tensor[:, :, :slots], (0, 0, 0, max(0, slots - tensor.shape[2])))


def error_of(read: Read, numbers: Tensor, dtype: torch.dtype) -> Tensor:
    """The error of the elements that a step reads, where `numbers` are exact; 0 for unquantized tokens."""
    error = reconstructed.element_error(numbers, read.minimum, dtype)
    return error.masked_fill(~read.packed[:, None, :, None], 0)


class Adapter(lockstep.Adapter):
    """The lockstep adapter: codes, scales and minima that are bitwise equal, and the output of a step within the bound
    of reconstructed attention. A method's adapter defines `reads`."""

    stored = ()

    def reads(self, state: Any) -> Iterator[Read]:
        """The keys and the values of a state, the method's exact numbers."""
        raise NotImplementedError

    def dtype_of(self, part: str) -> torch.dtype:
        """The dtype of scales or minima."""
        return self.dtype

    def attach(self, tested: Any, reference: Any) -> None:
        reference._stored = self.dtype = tested.dtype if hasattr(tested, "dtype") else tested.key.dtype
        grow = reference._grow

        def watched(*counts: Any) -> None:
            self._snapshot(reference, int(counts[0].max()))
            grow(*counts)

        reference._grow = watched

    def _snapshot(self, reference: Any, slots: int) -> None:
        """Copy what a step attends to, before the reference quantizes. Adds the error of each element."""
        self.occupied = reference.occupied[:, :slots].clone()
        self.tokens = [one[:, :, :slots].clone() for one in (reference._key, reference._value)]
        self.errors = [
            error_of(read.first(slots), one, self.dtype)
            for read, one in zip(self.reads(reference), self.tokens, strict=True)
        ]

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
                        assert_dtype(one, self.dtype_of(part), what=f"{name}().{part}")
        except Mismatch as error:
            error.of_state = True
            raise


def read_by(adapter: Adapter, state: Any, rows: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """What a step of the first rows reads: keys and values [rows, Hkv, S, D] float64, the numbers that the codes stand
    for, and the errors of their elements, 0 for unquantized tokens."""
    slots = state.sizes.slots
    numbers: list[Tensor] = []
    errors: list[Tensor] = []
    for read, whole in zip(adapter.reads(state), (state.key, state.value), strict=True):
        one = read.first(slots)
        some = Read(one.exact[:rows], one.minimum[:rows], one.packed[:rows])
        numbers.append(some.exact.where(some.packed[:, None, :, None], whole[:rows].double()))
        errors.append(error_of(some, some.exact, state.dtype))
    return numbers[0], numbers[1], errors[0], errors[1]
