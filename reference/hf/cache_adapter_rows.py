"""Rows of a cache that change between forward passes: for beams, and for several continuations of one prefix. Both
sides share this module, which contains no mathematics.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ..contract.arguments import check_integer, check_product, check_reorder, check_tensor
from .options import Configured


class Rows(Configured):
    """A cache whose layers exchange, repeat and select rows, together with what the layers share."""

    #: How often states with another number of rows have replaced those of the layers.
    row_changes = 0

    @property
    def _shared(self) -> Any:
        """What the layers share that has rows of its own, None if there is nothing."""
        return None

    @property
    def _makers(self) -> tuple[object, ...]:
        """The objects that have `_shared` as an attribute. They create it together with the first state."""
        return ()

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Replace row b by row beam_idx[b]: beam_idx [B] of any integer dtype. TypeError or ValueError for any other,
        before a layer changes."""
        index = as_rows("beam_idx", beam_idx)
        used = [layer for layer in self.layers if hasattr(layer, "pending") and layer.state is not None]
        for layer in used[:1]:
            check_reorder(index.to(layer.device), layer.rows, layer.device, name="beam_idx")
        super().reorder_cache(index)
        if self._shared is not None:
            self._shared.reorder(index.to(self._shared.device))

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Put `repeats` copies of each row in its place, for as many continuations of it.

        A cache without tokens stays as it is. TypeError or ValueError for other numbers than 1, 2..., RuntimeError
        after an interrupted forward pass, NotImplementedError if a layer of another kind has no such method, all before
        a layer changes.
        """
        check_integer("repeats", repeats, minimum=1)
        rows = self._rows_now("batch_repeat_interleave")
        check_product(rows=max(rows, 1), repeats=repeats)
        self._keep_rows(
            torch.arange(rows).repeat_interleave(repeats), lambda layer: layer.batch_repeat_interleave(repeats)
        )

    def batch_select_indices(self, indices: Tensor) -> None:
        """Replace the B rows by the rows `indices` [N] of any integer dtype, from 0 to B - 1, in this order. A row may
        be named several times, or not at all. Errors as of `batch_repeat_interleave`."""
        index = as_rows("indices", indices)
        rows = self._rows_now("batch_select_indices")
        low, high = int(index.min()), int(index.max())
        if low < 0 or (rows and high >= rows):
            raise ValueError(f"indices must name rows 0 to {rows - 1}, got values from {low} to {high}")
        self._keep_rows(index, lambda layer: layer.batch_select_indices(index))

    def _rows_now(self, method: str) -> int:
        """The number of rows, 0 if no layer that evicts has tokens. Checks that all layers can change it now."""
        for layer in self.layers:
            if not hasattr(layer, "pending") and not hasattr(layer, method):
                raise NotImplementedError(f"{method}() is not supported: a {type(layer).__name__} has no such method")
            if getattr(layer, "pending", 0):
                raise RuntimeError(
                    "a forward pass was interrupted: call reset() on the cache and pass all tokens again"
                )
        self._check_progress()
        used = self._with_tokens()
        return used[0].rows if used else 0

    def _check_progress(self) -> None:
        """RuntimeError if a forward pass was interrupted between two layers."""

    def _with_tokens(self) -> list[Any]:
        return [layer for layer in self.layers if hasattr(layer, "pending") and layer.get_seq_length()]

    def _keep_rows(self, index: Tensor, change: Callable[[Any], None]) -> None:
        """Give all layers the rows `index` [N] int64: those of other kinds by `change`. An error, such as one of memory
        that is missing, leaves the layers as they were."""
        used, shared = self._with_tokens(), self._shared
        if used and len(index) == used[0].rows:         # in place, as graphs of steps need it
            for layer in used:
                layer.reorder_cache(index)
                layer.adopt(layer.state, index)
            if shared is not None:
                shared.reorder(index.to(shared.device))
        elif used:
            before = [(maker, dict(vars(maker))) for maker in self._makers]
            try:
                states = [layer.state_of_rows(index) for layer in used]
                if shared is not None:
                    self._shared._take_rows(shared, index.to(shared.device))
            except BaseException:
                for maker, attributes in before:
                    vars(maker).update(attributes)
                raise
            for layer, state in zip(used, states, strict=True):
                layer.adopt(state, index)
            self.row_changes += 1
        for layer in self.layers:
            if not hasattr(layer, "pending"):
                change(layer)


def as_rows(name: str, index: object) -> Tensor:
    """Return the argument `name`, the numbers of rows [N] of any integer dtype, as int64."""
    index = check_tensor(name, index, dims=1, layout="[B]" if name == "beam_idx" else "[N]")
    if index.dtype not in (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8):
        raise TypeError(f"{name} must have an integer dtype, got {index.dtype}")
    return index.to(torch.int64)
