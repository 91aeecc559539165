"""What an error may interrupt in the middle of a change, such as an out-of-memory error in a step."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .arguments import check_reorder

_last_change: list[object] = [object()]


def note_change() -> None:
    """Say that what the host knows of some state or cache has changed. Not in compiled code."""
    _last_change[0] = object()


def last_change() -> object:
    """The last change of any state or cache on the host, in all threads: an object of its own for each."""
    return _last_change[0]


class Interruptible:
    """A state that notices that a change of it did not end.

    Its methods call `_start_change` after they have checked their arguments, and `_end_change` at their end. After an
    error between the two, everything but `reset` raises RuntimeError. Errors in arguments leave the state as it was.
    """

    _interrupted: str | None = None             # the method that started a change and has not ended it

    def _start_change(self, what: str) -> None:
        """From here on, an error leaves the state unusable until `reset()`. RuntimeError if it is so already."""
        self._check_whole()
        self._interrupted = what

    def _end_change(self) -> None:
        self._interrupted = None

    def _check_whole(self) -> None:
        """RuntimeError if a change did not end."""
        if self._interrupted is not None:
            raise RuntimeError(
                f"{type(self).__name__} is incomplete, because an error interrupted {self._interrupted}(): call reset()"
            )


class Reorderable(Interruptible):
    """Rows of a batch that beam search exchanges. A subclass says how many there are, and exchanges what it holds."""

    device: torch.device

    @property
    def _num_rows(self) -> int:
        raise NotImplementedError

    def reorder(self, index: Tensor) -> None:
        """Replace row b by row index[b], as beam search requires. index [B] int64. TypeError or ValueError for other
        indices; RuntimeError if an error interrupted a change."""
        self._take_rows(self, check_reorder(index, self._num_rows, self.device))

    def _take_rows(self, source: Any, index: Tensor) -> None:
        """Replace row b by row index[b] of `source`: this object, or one that differs at most in its number of rows.
        index [B] int64, checked by the caller. RuntimeError if an error interrupted a change of either."""
        source._check_whole()
        self._start_change("reorder")
        self._take(source, index)
        self._end_change()

    def _take(self, source: Any, index: Tensor) -> None:
        """`_take_rows` without its checks."""
        raise NotImplementedError
