"""Capture of CUDA graphs."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def capture(graph: torch.cuda.CUDAGraph) -> Iterator[None]:
    """As ``torch.cuda.graph``, without garbage collection: what it frees, such as pinned memory of earlier cases, may
    make calls of CUDA that end a capture with an error. After an error the stream is the one before, which
    ``torch.cuda.graph`` forgets."""
    enabled, stream = gc.isenabled(), torch.cuda.current_stream()
    gc.collect()
    gc.disable()
    try:
        with torch.cuda.graph(graph):
            yield
    finally:
        torch.cuda.set_stream(stream)
        if enabled:
            gc.enable()
