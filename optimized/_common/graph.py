"""The work of one block of tokens as a CUDA graph, for prompts of many blocks.

With a small batch, the host takes longer to launch the kernels of a block than the GPU takes to run them. A graph is
launched as a whole. It runs the same kernels as calls without a graph, so the results have the same bits.

A graph finds its data at fixed addresses. Several blocks of the prompt, a chunk, are copied to memory of the graph at a
time. Each replay takes the chunk's next block, appends it, and puts the output at the block's place.
"""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext, suppress
from typing import Any
from weakref import WeakKeyDictionary

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...reference._validate import capturing
from .launch import SMALL_TILES, on_device_of

Append = Callable[..., Tensor]

#: Blocks of a prompt from which a graph is worth its capture.
BLOCKS = 8
#: Elements of a block's largest tensor up to which the host is slower than the GPU. It also limits a graph's memory.
ELEMENTS = 2**23
#: Blocks of a chunk: more of them need more memory and hardly less time.
CHUNK = 8
#: Shapes whose memory is kept.
MEMORIES = 8
#: Devices that have graphs.
DEVICES = ("cuda",)
#: Elements that a program copies.
COPIED = 64 if SMALL_TILES else 4096

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


class Prompt:
    """The first `count` blocks of `size` tokens of a prompt: tensors [B, H, T, D] or [B, T], the largest one first;
    output like the first."""

    def __init__(self, tensors: tuple[Tensor, ...], output: Tensor, size: int, count: int) -> None:
        self.tensors, self.output, self.size, self.count = tensors, output, size, count

    def chunk(self, tensor: Tensor, first: int, count: int) -> Tensor:
        """These blocks of a tensor: [count, B, H, size, D] or [count, B, size]."""
        axis = 2 if tensor.dim() == 4 else 1
        part = tensor.narrow(axis, first * self.size, count * self.size)
        return part.unflatten(axis, (count, self.size)).movedim(axis, 0)

    def shapes(self) -> tuple[Any, ...]:
        """What the graphs of two prompts must have in common to share their memory."""
        device = self.tensors[0].device
        stream = torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else 0
        blocks = (self.chunk(tensor, 0, 1) for tensor in self.tensors)
        return device, stream, *((tensor.shape, tensor.dtype) for tensor in blocks)


class Memory:
    """What the graphs of the same shapes on the same stream share, since they run one after the other: a chunk and its
    output, the tensors of a block, the streams of captures, and the pool of all other tensors."""

    def __init__(self, prompt: Prompt) -> None:
        blocks = [prompt.chunk(tensor, 0, 1) for tensor in prompt.tensors]
        device = blocks[0].device
        self.blocks = max(1, min(CHUNK, ELEMENTS // max(1, blocks[0].numel())))
        with torch.inference_mode(False):
            self.chunk = tuple(
                torch.empty((self.blocks, *one.shape[1:]), dtype=one.dtype, device=device) for one in blocks
            )
            self.inputs = tuple(torch.empty_like(one[0]) for one in self.chunk)
            self.output = torch.empty_like(self.chunk[0])
            # The block that the next replay takes, and the block whose output is put next.
            self.numbers = torch.zeros(2, dtype=torch.int64, device=device)
        self.lock = threading.Lock()
        self.stream: Any = None
        self.branch: Any = None
        self.pool: Any = None
        self._anchor: Callable[[], None] | None = None
        if device.type == "cuda":
            self.stream, self.branch, self.pool = (
                torch.cuda.Stream(), torch.cuda.Stream(), torch.cuda.graph_pool_handle()
            )

    def keep_pool(self) -> None:
        """Capture a graph that stays: a pool whose last graph is gone cannot be used again. Raises RuntimeError where a
        capture cannot allocate memory, such as with PYTORCH_NO_CUDA_MEMORY_CACHING=1."""
        if self.pool is not None and self._anchor is None:
            self._anchor = captured(lambda: torch.zeros(1, device=self.numbers.device), self)

    def load(self, prompt: Prompt, first: int, count: int) -> None:
        """Copy a chunk, the first block of which the next replay takes."""
        for mine, given in zip(self.chunk, prompt.tensors, strict=True):
            mine[:count].copy_(prompt.chunk(given.detach(), first, count))
        self.numbers.zero_()

    def store(self, prompt: Prompt, first: int, count: int) -> None:
        """Copy the output of a chunk."""
        prompt.chunk(prompt.output, first, count).copy_(self.output[:count])

    def append(self, append: Append) -> Tensor:
        """Append the chunk's next block, and put its output in its place."""
        _copy(self.chunk, self.inputs, self.numbers, TAKES=True)
        output = append(*self.inputs)
        _copy((output,), (self.output,), self.numbers, TAKES=False)
        return output


#: Up to MEMORIES of them, the oldest first. They outlive the states, so that the next states use their pools again.
_memories: dict[tuple[Any, ...], Memory] = {}
_lock = threading.Lock()
#: One capture at a time: memories may have the same streams, since PyTorch hands out 32 in turn.
_one_capture = threading.Lock()
#: `branch`: that of the capture under way in this thread.
_capture = threading.local()


def _memory(shapes: tuple[Any, ...], prompt: Prompt) -> Memory:
    with _lock:
        if shapes not in _memories:
            _memories[shapes] = Memory(prompt)
            if len(_memories) > MEMORIES:
                del _memories[next(iter(_memories))]
        return _memories[shapes]


class BlockGraph:
    """A state's work of one block, `append(*block)`, captured; the result is the block's output.

    It is right as long as `buffers`, the state's tensors, stay where they are: see `fits`. The first block compiles the
    kernels, and its call is captured for the next ones. After a failed capture there is no graph, and `append` is
    called for each block.
    """

    def __init__(self, prompt: Prompt, buffers: tuple[Tensor, ...]) -> None:
        self._shapes, self._places = prompt.shapes(), _places(buffers)
        self._memory: Memory | None = _memory(self._shapes, prompt)
        self._replay: Callable[[], None] | None = None

    def fits(self, prompt: Prompt, buffers: tuple[Tensor, ...]) -> bool:
        """Whether the graph does for a block what plain calls would."""
        return prompt.shapes() == self._shapes and _places(buffers) == self._places

    def run(self, append: Append, prompt: Prompt) -> None:
        """Append all blocks."""
        first = 0
        while (memory := self._memory) is not None and first < prompt.count:
            count = min(memory.blocks, prompt.count - first)
            with memory.lock:
                memory.load(prompt, first, count)
                for number in range(count):
                    self._append(append, memory)
                    if self._memory is None:                           # the capture has failed
                        count = number + 1
                        break
                memory.store(prompt, first, count)
            first += count
        for number in range(first, prompt.count):
            output = append(*(prompt.chunk(tensor, number, 1)[0] for tensor in prompt.tensors))
            prompt.chunk(prompt.output, number, 1)[0].copy_(output)

    def _append(self, append: Append, memory: Memory) -> None:
        if self._replay is not None:
            self._replay()
            return
        memory.append(append)
        try:
            memory.keep_pool()
            self._replay = captured(lambda: memory.append(append), memory)
        except RuntimeError as error:
            self._memory = None
            with _lock:
                _memories.pop(self._shapes, None)
            warnings.warn(f"prompts are appended block by block, without a CUDA graph: {error}", stacklevel=2)


def captured(function: Callable[[], object], memory: Memory) -> Callable[[], None]:
    """Capture a call without running it. Returns what runs it."""
    graph, stream = torch.cuda.CUDAGraph(), torch.cuda.current_stream()
    # Outside of inference mode, in which PyTorch's random generator could not be captured again in another mode.
    with _one_capture, torch.inference_mode(False), torch.no_grad(), torch.cuda.stream(memory.stream):
        memory.stream.wait_stream(stream)
        # Not torch.cuda.graph(), which also collects garbage and empties the allocator's cache.
        graph.capture_begin(pool=memory.pool, capture_error_mode="thread_local")
        _capture.branch = memory.branch
        try:
            function()
        except BaseException:
            with suppress(RuntimeError):                               # for example, that a branch was not joined
                graph.capture_end()
            raise
        finally:
            _capture.branch = None
        graph.capture_end()
    stream.wait_stream(memory.stream)
    return graph.replay


def fork() -> Any:
    """A stream for a branch of the graph that `captured` captures in this thread, from here to `join`; None if it does
    not. (In a capture of the caller's, several states could use one branch at the same time.)"""
    side = None if torch.compiler.is_compiling() else getattr(_capture, "branch", None)
    if side is not None:
        side.wait_stream(torch.cuda.current_stream(side.device))
    return side


def on(side: Any) -> AbstractContextManager[object]:
    """A context that launches on a stream that `fork`, here or in beside.py, returned."""
    return nullcontext() if side is None else torch.cuda.stream(side)


def join(side: Any) -> None:
    """From here on, the current stream waits for `side`."""
    if side is not None:
        torch.cuda.current_stream(side.device).wait_stream(side)


def run_blocks(
    state: Any, append: Append, prompt: tuple[Tensor, ...], output: Tensor, size: int, count: int,
    buffers: tuple[Tensor, ...],
) -> None:
    """Append the first `count` blocks of `size` tokens of a prompt to a state by its graph, which is captured when
    there is none that fits. prompt: the arguments of `append` for all tokens, [B, H, T, D] or [B, T], and its results.
    """
    if not count:
        return
    given = Prompt(prompt, output, size, count)
    with on_device_of(prompt[0]):
        graph = _graphs.get(state)
        if graph is None or not graph.fits(given, buffers):
            graph = BlockGraph(given, buffers)
            _graphs[state] = graph
        graph.run(append, given)


def _places(buffers: tuple[Tensor, ...]) -> tuple[tuple[int, ...], ...]:
    return tuple((tensor.data_ptr(), *tensor.shape, *tensor.stride()) for tensor in buffers)


def _copy(sources: tuple[Tensor, ...], targets: tuple[Tensor, ...], numbers: Tensor, *, TAKES: bool) -> None:
    """TAKES: copy a block of each source to its target; else copy each source to a block of its target. `numbers` says
    which block, and counts."""
    blocks = targets if TAKES else sources
    counts = [tensor.numel() for tensor in blocks]
    pairs = [tensor for pair in zip(sources, targets, strict=True) for tensor in pair]
    missing = 4 - len(blocks)
    assert missing >= 0
    copy_kernel[(max(1, triton.cdiv(max(counts, default=0), COPIED)),)](
        *pairs, *([numbers] * 2 * missing), numbers, *counts, *([0] * missing), NUMBER=len(blocks), TAKES=TAKES,
        SIZE=COPIED, num_warps=4,
    )


@triton.jit
def _copy_part(source, target, count, block, SIZE: tl.constexpr, TAKES: tl.constexpr):
    i = tl.program_id(0) * SIZE + tl.arange(0, SIZE)
    if TAKES:
        source += block * count
    else:
        target += block * count
    tl.store(target + i, tl.load(source + i, mask=i < count), mask=i < count)


@triton.jit
def copy_kernel(
    source0, target0, source1, target1, source2, target2, source3, target3, numbers, count0, count1, count2, count3,
    NUMBER: tl.constexpr, TAKES: tl.constexpr, SIZE: tl.constexpr,
):
    """Program (SIZE elements of each of NUMBER tensors). A launch reads one of the two numbers and writes the other, so
    that no program reads what another writes."""
    block = tl.load(numbers) if TAKES else tl.load(numbers + 1)
    if NUMBER > 0:
        _copy_part(source0, target0, count0, block, SIZE, TAKES)
    if NUMBER > 1:
        _copy_part(source1, target1, count1, block, SIZE, TAKES)
    if NUMBER > 2:
        _copy_part(source2, target2, count2, block, SIZE, TAKES)
    if NUMBER > 3:
        _copy_part(source3, target3, count3, block, SIZE, TAKES)
    if tl.program_id(0) == 0:
        if TAKES:
            tl.store(numbers + 1, block)
        else:
            tl.store(numbers, block + 1)
