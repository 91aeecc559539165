"""Capture of CUDA graphs in tests."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def capture(graph: torch.cuda.CUDAGraph) -> Iterator[None]:
    """As ``torch.cuda.graph``, without garbage collection: what it frees, such as pinned memory of earlier tests, may
    make calls of CUDA that end a capture with an error."""
    enabled = gc.isenabled()
    gc.collect()
    gc.disable()
    try:
        with torch.cuda.graph(graph):
            yield
    finally:
        if enabled:
            gc.enable()
