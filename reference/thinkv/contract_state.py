"""The arguments of ThinKV's state, checked for both sides. No mathematics."""

from __future__ import annotations

from torch import Tensor

from ..contract import capturing, check_like, check_shape, check_tensor
from .contract import Thought


def check_room(seen: int, more: int, most: int) -> None:
    """ValueError where a state would see more tokens than its tables were made for."""
    if seen + more > most:
        raise ValueError(f"max_tokens must be at least the {seen + more} tokens that come, got {most}")


def check_thought(value: object, like: Tensor) -> Tensor:
    """Thought types written into a state: [B] int64 from 0 to 2.

    Reads the values (one synchronisation) unless a graph captures.
    """
    value = check_tensor("thought", value, dims=1, layout="[B]")
    check_shape("thought", value, tuple(like.shape), "[B]")
    check_like("thought", value, like, "the state")
    if not capturing(value.device):
        low, high = int(value.min()), int(value.max())
        if low < min(Thought) or high > max(Thought):
            raise ValueError(f"thought must be from 0 to 2, got values from {low} to {high}")
    return value
