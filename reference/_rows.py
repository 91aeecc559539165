"""Rows of the reference's states in another order, or of another state: each attribute becomes a new tensor."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor

from .contract.interruption import Reorderable


class Rows:
    """What has attributes with a row per sequence, first in their shape. A subclass lists their names: in `_per_slot`
    those with an element per slot, in `_per_row` other tensors, in `_nested` objects that exchange their own rows, or
    None; and in `_of_all_rows` the numbers that all rows share."""

    _per_slot: ClassVar[tuple[str, ...]] = ()
    _per_row: ClassVar[tuple[str, ...]] = ()
    _nested: ClassVar[tuple[str, ...]] = ()
    _of_all_rows: ClassVar[tuple[str, ...]] = ()

    @torch.inference_mode(False)  # tensors made in inference mode could not be updated outside of it
    def _take(self, source: Any, index: Tensor) -> None:
        """See `Reorderable._take_rows`."""
        for name in (*self._per_slot, *self._per_row):
            setattr(self, name, getattr(source, name).index_select(0, index))
        for name in self._of_all_rows:
            setattr(self, name, getattr(source, name))
        for name in self._nested:
            held: Any = getattr(self, name)
            if held is not None:
                take = held._take_rows if isinstance(held, Reorderable) else held._take
                take(getattr(source, name), index)
