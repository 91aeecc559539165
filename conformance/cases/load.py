"""What a call's result must not depend on: what memory held before, and what else a GPU does."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch
from torch import Tensor

#: Bytes that fill memory before it is used: zeros; large numbers; NaN, and -1 in integers.
FILLS = (0, 0x7F, 0xFF)


@contextmanager
def memory_filled_with(byte: int) -> Iterator[None]:
    """Memory is allocated with this byte in it instead of old contents."""

    def filling(make: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def allocate(*sizes: Any, **options: Any) -> Tensor:
            made = make(*sizes, **options)
            if made.dtype == torch.bool:
                return made.fill_(bool(byte))
            made.untyped_storage().fill_(byte)  # type: ignore[attr-defined]
            return made

        return allocate

    with ExitStack() as stack:
        for owner, name in ((torch, "empty"), (torch, "empty_like"), (Tensor, "new_empty")):
            stack.enter_context(mock.patch.object(owner, name, filling(getattr(owner, name))))
        yield


class Load:
    """Work on a second stream of a GPU. Each call of `add` enqueues some more, of random size, and does not wait."""

    def __init__(self, device: torch.device, seed: int) -> None:
        self.random = random.Random(seed)
        self.stream = None if device.type == "cpu" else torch.cuda.Stream(device)
        self.matrix = torch.zeros(2048, 2048, device=device) if self.stream else None

    def add(self) -> None:
        if self.stream is None or self.matrix is None:
            return
        size = 64 * self.random.randint(1, 32)
        with torch.cuda.stream(self.stream):
            part = self.matrix[:size, :size]
            torch.mm(part, part)
            self.matrix.add_(1)


def scatter_allocations(device: torch.device, seed: int, blocks: int = 12) -> list[Tensor]:
    """Allocations of random sizes up to 64 MB, of which every second one is freed again. While the caller keeps the
    rest, later allocations lie elsewhere, in memory that holds -1, or NaN."""
    sizes = random.Random(seed)
    held = [torch.empty(2 ** sizes.randint(9, 26), dtype=torch.uint8, device=device).fill_(0xFF) for _ in range(blocks)]
    return held[::2]
