"""What an error may interrupt in the middle of a change, such as an out-of-memory error in a step."""

from __future__ import annotations


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
