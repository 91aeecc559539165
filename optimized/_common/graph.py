"""The work of one block of tokens as a CUDA graph, for prompts of many blocks.

A block of a small batch keeps the GPU busy for less time than the host needs for its launches. A graph takes one
launch. Its kernels are those of the plain calls, so its results have the same bits.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any
from weakref import WeakKeyDictionary, WeakValueDictionary

import torch
from torch import Tensor

from ...reference._validate import capturing
from .launch import on_device_of

Append = Callable[..., Tensor | None]

#: Blocks of a prompt from which a graph is worth its capture.
BLOCKS = 8
#: Elements of a block's largest tensor up to which the host is slower than the GPU. It also limits a graph's memory.
ELEMENTS = 2**23
#: Devices that have graphs.
DEVICES = ("cuda",)

#: Each state's graph. States are copied and stored, and graphs cannot be.
_graphs: WeakKeyDictionary[Any, BlockGraph] = WeakKeyDictionary()


def worth_a_graph(prompt: Tensor, block_size: int) -> bool:
    """Whether the blocks of a prompt [B, H, T, D], its largest tensor, are to be replays of a graph."""
    batch, heads, total, head_dim = prompt.shape
    return (
        prompt.device.type in DEVICES and total // block_size >= BLOCKS
        and batch * heads * block_size * head_dim <= ELEMENTS
        and not torch.compiler.is_compiling() and not capturing(prompt.device)
    )


class Memory:
    """What the graphs of the same shapes on the same stream share, since they run one after the other: the tensors of a
    block, and the pool of all others."""

    def __init__(self, block: tuple[Tensor, ...]) -> None:
        with torch.inference_mode(False):
            self.inputs = tuple(torch.empty(one.shape, dtype=one.dtype, device=one.device) for one in block)
        self.pool = torch.cuda.graph_pool_handle() if block[0].is_cuda else None

    def take(self, block: tuple[Tensor, ...]) -> None:
        for mine, given in zip(self.inputs, block, strict=True):
            mine.copy_(given.detach())


_memories: WeakValueDictionary[tuple[Any, ...], Memory] = WeakValueDictionary()


class BlockGraph:
    """Full blocks of a state: `append(*block)`, which returns the block's output if it has one, to be captured.

    Constructing it runs `append` for the first block, which also compiles the kernels, and captures the call after.
    The graph is right as long as `buffers`, the state's tensors, stay where they are: see `fits`.
    """

    def __init__(
        self, append: Append, block: tuple[Tensor, ...], output: Tensor | None, buffers: tuple[Tensor, ...]
    ) -> None:
        self._shapes, self._places = _shapes(block), _places(buffers)
        memory = _memories.get(self._shapes)
        self._memory = _memories[self._shapes] = Memory(block) if memory is None else memory
        self._memory.take(block)
        _copy(append(*self._memory.inputs), output)
        self._replay, self._output = captured(lambda: append(*self._memory.inputs), self._memory.pool)

    def fits(self, block: tuple[Tensor, ...], buffers: tuple[Tensor, ...]) -> bool:
        """Whether the graph does for a block what plain calls would."""
        return _shapes(block) == self._shapes and _places(buffers) == self._places

    def run(self, block: tuple[Tensor, ...], output: Tensor | None) -> None:
        self._memory.take(block)
        self._replay()
        _copy(self._output, output)


def captured(function: Callable[[], Tensor | None], pool: Any) -> tuple[Callable[[], None], Tensor | None]:
    """Capture a call without running it. Returns what runs it, and its result, which each run overwrites."""
    graph, stream, side = torch.cuda.CUDAGraph(), torch.cuda.current_stream(), torch.cuda.Stream()
    side.wait_stream(stream)
    with torch.cuda.stream(side):
        # Not torch.cuda.graph(), which also collects garbage and empties the allocator's cache.
        graph.capture_begin(pool=pool, capture_error_mode="thread_local")
        try:
            result = function()
        finally:
            graph.capture_end()
    stream.wait_stream(side)
    return graph.replay, result


def run_blocks(
    state: Any, append: Append, blocks: Sequence[tuple[Tensor, ...]], outputs: Sequence[Tensor | None],
    buffers: tuple[Tensor, ...],
) -> None:
    """Append full blocks to a state by its graph, which is captured when there is none that fits."""
    if not blocks:
        return
    with on_device_of(blocks[0][0]):
        graph, done = _graphs.get(state), 0
        if graph is None or not graph.fits(blocks[0], buffers):
            graph, done = BlockGraph(append, blocks[0], outputs[0], buffers), 1
            _graphs[state] = graph
        for block, output in zip(blocks[done:], outputs[done:], strict=True):
            graph.run(block, output)


def _copy(given: Tensor | None, output: Tensor | None) -> None:
    if output is not None:
        assert given is not None
        output.copy_(given)


def _shapes(block: tuple[Tensor, ...]) -> tuple[Any, ...]:
    device = block[0].device
    stream = torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else 0
    return device, stream, *((tensor.shape, tensor.dtype) for tensor in block)


def _places(buffers: tuple[Tensor, ...]) -> tuple[tuple[int, ...], ...]:
    return tuple((tensor.data_ptr(), *tensor.shape, *tensor.stride()) for tensor in buffers)
