"""The work of one block of tokens as a CUDA graph, for prompts of many blocks.

With a small batch, the host takes longer to launch the kernels of a block than the GPU takes to run them. A graph is
launched as a whole. It runs the same kernels as calls without a graph, so the results have the same bits.
"""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable, Sequence
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from ...reference._validate import capturing
from .launch import on_device_of

Append = Callable[..., Tensor | None]

#: Blocks of a prompt from which a graph is worth its capture.
BLOCKS = 8
#: Elements of a block's largest tensor up to which the host is slower than the GPU. It also limits a graph's memory.
ELEMENTS = 2**23
#: Shapes whose memory is kept.
MEMORIES = 8
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
    block, the stream of captures, and the pool of all other tensors."""

    def __init__(self, block: tuple[Tensor, ...]) -> None:
        with torch.inference_mode(False):
            self.inputs = tuple(torch.empty(one.shape, dtype=one.dtype, device=one.device) for one in block)
        self.lock = threading.Lock()
        self.stream: Any = None
        self.pool: Any = None
        if block[0].is_cuda:
            self.stream, self.pool = torch.cuda.Stream(), torch.cuda.graph_pool_handle()
            # A pool whose last graph is gone cannot be used again.
            self._anchor = captured(lambda: torch.zeros(1, device=block[0].device), self)

    def take(self, block: tuple[Tensor, ...]) -> None:
        for mine, given in zip(self.inputs, block, strict=True):
            mine.copy_(given.detach())


#: Up to MEMORIES of them, the oldest first. They outlive the states, so that the next states use their pools again.
_memories: dict[tuple[Any, ...], Memory] = {}
_lock = threading.Lock()


def _memory(shapes: tuple[Any, ...], block: tuple[Tensor, ...]) -> Memory:
    with _lock:
        if shapes not in _memories:
            _memories[shapes] = Memory(block)
            if len(_memories) > MEMORIES:
                del _memories[next(iter(_memories))]
        return _memories[shapes]


class BlockGraph:
    """A state's work of one block, `append(*block)`, captured; the result is the block's output, if it has one.

    It is right as long as `buffers`, the state's tensors, stay where they are: see `fits`. After a failed capture there
    is no graph, and `append` is called for each block.
    """

    def __init__(
        self, append: Append, block: tuple[Tensor, ...], output: Tensor | None, buffers: tuple[Tensor, ...]
    ) -> None:
        """Append the first block, which also compiles the kernels, and capture the call for the next ones."""
        self._shapes, self._places = _shapes(block), _places(buffers)
        self._memory = _memory(self._shapes, block)
        self._replay: Callable[[], None] | None = None
        self._output: Tensor | None = None
        with self._memory.lock:
            self._memory.take(block)
            _copy(append(*self._memory.inputs), output)
            try:
                self._replay, self._output = captured(lambda: append(*self._memory.inputs), self._memory)
            except RuntimeError as error:
                with _lock:
                    _memories.pop(self._shapes, None)
                warnings.warn(f"prompts are appended block by block, without a CUDA graph: {error}", stacklevel=2)

    def fits(self, block: tuple[Tensor, ...], buffers: tuple[Tensor, ...]) -> bool:
        """Whether the graph does for a block what plain calls would."""
        return _shapes(block) == self._shapes and _places(buffers) == self._places

    def run(self, append: Append, block: tuple[Tensor, ...], output: Tensor | None) -> None:
        if self._replay is None:
            _copy(append(*block), output)
            return
        with self._memory.lock:
            self._memory.take(block)
            self._replay()
            _copy(self._output, output)


def captured(function: Callable[[], Tensor | None], memory: Memory) -> tuple[Callable[[], None], Tensor | None]:
    """Capture a call without running it. Returns what runs it, and its result, which each run overwrites."""
    graph, stream = torch.cuda.CUDAGraph(), torch.cuda.current_stream()
    memory.stream.wait_stream(stream)
    # Outside of inference mode, in which PyTorch's random generator could not be captured again in another mode.
    with torch.inference_mode(False), torch.no_grad(), torch.cuda.stream(memory.stream):
        # Not torch.cuda.graph(), which also collects garbage and empties the allocator's cache.
        graph.capture_begin(pool=memory.pool, capture_error_mode="thread_local")
        try:
            result = function()
        finally:
            graph.capture_end()
    stream.wait_stream(memory.stream)
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
            graph.run(append, block, output)


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
