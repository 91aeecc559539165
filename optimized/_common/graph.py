"""The work of some blocks of tokens as a CUDA graph, for prompts of many blocks.

With a small batch, the host takes longer to launch the kernels of a block than the GPU takes to run them. A graph is
launched as a whole. It runs the same kernels as calls without a graph, so the results have the same bits.

A graph finds its data at fixed addresses. Some blocks of the prompt, a chunk, are copied to memory of the graph. A
replay appends all of them, and their output is copied from the graph's memory. The memory has two halves, with a graph
for each: while one replay runs, a second stream copies the output of the replay before and the next chunk.
"""

from __future__ import annotations

import gc
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from ...reference.contract.arguments import capturing
from .copies import copy_blocks
from .launch import on_device_of

Append = Callable[..., Tensor]

#: Blocks of a prompt from which a graph is worth its capture.
BLOCKS = 8
#: Elements of a block's largest tensor up to which the host is slower than the GPU.
ELEMENTS = 2**23
#: The most blocks of a chunk.
CHUNK = 8
#: The most bytes of two chunks and their outputs, for each row of up to ROWS of a batch. One block may have more.
CHUNK_BYTES, ROWS = 48 * 2**20, 4
#: A chunk has at most 1/TIMES of the prompt's blocks: a capture takes the host as long as plain calls.
TIMES = 8
#: Shapes whose memory is kept, until the process ends.
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


class Prompt:
    """The first `count` blocks of `size` tokens of a prompt: tensors [B, H, T, D] or [B, T], the largest one first;
    output like the first."""

    def __init__(self, tensors: tuple[Tensor, ...], output: Tensor, size: int, count: int) -> None:
        self.tensors, self.output, self.size, self.count = tensors, output, size, count

    def chunk(self, tensor: Tensor, first: int, count: int) -> Tensor:
        """These blocks of a tensor: [count, B, H, size, D] or [count, B, size]."""
        return self.chunks(tensor, first, 1, count)[0]

    def chunks(self, tensor: Tensor, first: int, number: int, count: int) -> Tensor:
        """Chunks of `count` blocks from block `first` on: [number, count, B, H, size, D] or [number, count, B, size].
        """
        axis = 2 if tensor.dim() == 4 else 1
        part = tensor.narrow(axis, first * self.size, number * count * self.size)
        return part.unflatten(axis, (number, count, self.size)).movedim((axis, axis + 1), (0, 1))

    def shapes(self) -> tuple[Any, ...]:
        """What the graphs of two prompts must have in common to share their memory."""
        device = self.tensors[0].device
        stream = torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else 0
        blocks = (self.chunk(tensor, 0, 1) for tensor in self.tensors)
        return device, stream, *((tensor.shape, tensor.dtype) for tensor in blocks)


class Move(NamedTuple):
    """The copies for a chunk: its half of the memory, targets and sources of its tensors, and target and source of its
    output."""

    half: int
    given: list[tuple[Tensor, Tensor]]
    output: Tensor
    result: Tensor


class Pool:
    """What graphs share that run one after the other: the stream of captures, that of a branch, and the memory of all
    tensors that are allocated in captures. streams: both, by default new ones."""

    def __init__(self, device: torch.device, streams: tuple[Any, Any] | None = None) -> None:
        self.device = device
        self.pool: Any = None
        self._anchor: Callable[[], None] | None = None
        self.stream, self.branch = two_streams(device) if streams is None else streams
        if device.type == "cuda":
            self.pool = torch.cuda.graph_pool_handle()

    def keep_pool(self) -> None:
        """Capture a graph that stays: a pool whose last graph is gone cannot be used again. Raises RuntimeError where a
        capture cannot allocate memory, such as with PYTORCH_NO_CUDA_MEMORY_CACHING=1."""
        if self.pool is not None and self._anchor is None:
            self._anchor = captured(lambda: torch.zeros(1, device=self.device), self)


def two_streams(device: torch.device) -> tuple[Any, Any]:
    """Two streams of a GPU; None on another device."""
    if device.type != "cuda":
        return None, None
    return torch.cuda.Stream(device), torch.cuda.Stream(device)


class Memory(Pool):
    """What the graphs of the same shapes on the same stream share: two chunks and their outputs (one if a chunk has one
    block), and the stream of copies."""

    def __init__(self, prompt: Prompt) -> None:
        blocks = [prompt.chunk(tensor, 0, 1) for tensor in prompt.tensors]
        device = blocks[0].device
        super().__init__(device)
        size = sum(one.numel() * one.itemsize for one in (*blocks, blocks[0]))
        self.blocks = max(1, min(CHUNK, CHUNK_BYTES * min(ROWS, len(prompt.output)) // (2 * size)))
        halves = 2 if self.blocks > 1 else 1                            # a chunk of one block is always in the first
        with torch.inference_mode(False):
            self.chunk = tuple(
                torch.empty((halves, self.blocks, *one.shape[1:]), dtype=one.dtype, device=device) for one in blocks
            )
            self.output = torch.empty_like(self.chunk[0])
        #: Whether Triton takes the same kernels for all blocks of a chunk.
        self.aligned = all(one.numel() * one.itemsize % 16 == 0 for one in blocks)
        self.lock = threading.Lock()
        self.copies = torch.cuda.Stream() if device.type == "cuda" else None

    def moves(self, prompt: Prompt, first: int, count: int, halves: int) -> list[Move]:
        """What to copy for each whole chunk of `count` blocks from block `first` on, in turn to and from the first
        `halves` of the memory's two. Views of the whole prompt, since making views takes time."""
        number = (prompt.count - first) // count
        pairs = [
            (mine[:, :count], prompt.chunks(given.detach(), first, number, count))
            for mine, given in zip((*self.chunk, self.output), (*prompt.tensors, prompt.output), strict=True)
        ]
        pairs[-1] = in_words(*pairs[-1])
        mine = [[target[half] for target, _ in pairs] for half in range(halves)]
        theirs = zip(*(given.unbind(0) for _, given in pairs), strict=True)
        return [
            Move(turn % halves, list(zip(mine[turn % halves], given, strict=False)), output, mine[turn % halves][-1])
            for turn, (*given, output) in enumerate(theirs)
        ]

    def append(self, append: Append, count: int, half: int) -> None:
        """Append the blocks of a chunk, one after the other, which puts their output in `output`."""
        for number in range(count):
            append(*(tensor[half, number] for tensor in self.chunk), self.output[half, number])


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
    """A state's work of a chunk, captured: `append(*block, output)`, which stores the block's output, for each block.
    Without `output`, `append` returns a new one.

    It is right as long as `buffers`, the state's tensors, stay where they are: see `fits`. The first call of `append`
    compiles the kernels, which a capture cannot. A state's first prompt, often its only one, has chunks of one block:
    capturing eight takes the host as long as eight plain calls. Blocks behind the last whole chunk are chunks of
    one block, too. The second prompt captures a chunk in the memory's first half, and the third one also in its second
    half. After a failed capture, `append` is called for each block.
    """

    def __init__(self, prompt: Prompt, buffers: tuple[Tensor, ...]) -> None:
        self._shapes, self._places = prompt.shapes(), _places(buffers)
        self._memory: Memory | None = _memory(self._shapes, prompt)
        self._replays: dict[tuple[int, int], Callable[[], None]] = {}           # by a chunk's blocks and its half

    def fits(self, prompt: Prompt, buffers: tuple[Tensor, ...]) -> bool:
        """Whether the graph does for a block what plain calls would."""
        return prompt.shapes() == self._shapes and _places(buffers) == self._places

    def run(self, append: Append, prompt: Prompt) -> None:
        """Append all blocks."""
        first, most = 0, _power_of_two(prompt.count // TIMES) if self._replays else 1
        if (memory := self._memory) is not None:
            for count in dict.fromkeys((min(memory.blocks, most), 1)):
                first = self._append_chunks(append, memory, prompt, first, count)
        for number in range(first, prompt.count):
            block = (prompt.chunk(tensor, number, 1)[0] for tensor in prompt.tensors)
            prompt.chunk(prompt.output, number, 1)[0].copy_(append(*block))

    def _append_chunks(self, append: Append, memory: Memory, prompt: Prompt, first: int, count: int) -> int:
        """Append whole chunks of `count` blocks from block `first` on, until a capture fails. Returns the next block.
        """
        halves = 2 if count > 1 and (count, 0) in self._replays else 1
        with memory.lock, _Copies(memory if halves > 1 else None) as copies:
            moves = memory.moves(prompt, first, count, halves)
            for turn, move in enumerate(moves):
                if self._memory is None:
                    break
                if turn == 0 or halves == 1:
                    copies.bring(move)
                copies.brought()
                if not self._append(append, memory, count, move.half):
                    break
                copies.appended()
                if turn + 1 < len(moves) and halves > 1:
                    copies.bring(moves[turn + 1])                      # to the other half, while this one is appended
                copies.take(move)
                first += count
        return first

    def _append(self, append: Append, memory: Memory, count: int, half: int) -> bool:
        """Append the chunk in a half of the memory. Returns False if it was to be a replay and the capture failed."""
        if (count, half) in self._replays:
            self._replays[count, half]()
            return True
        compiled = bool(self._replays) and memory.aligned
        if not compiled:
            memory.append(append, count, half)
        try:
            memory.keep_pool()
            self._replays[count, half] = captured(lambda: memory.append(append, count, half), memory)
        except RuntimeError as error:
            self._memory = None
            with _lock:
                _memories.pop(self._shapes, None)
            warnings.warn(f"prompts are appended block by block, without a CUDA graph: {error}", stacklevel=2)
            return not compiled
        if compiled:
            self._replays[count, half]()
        return True


class _Copies:
    """The copies of chunks and their outputs. With a memory on a GPU, on a stream of their own, so that they run beside
    the replays; it ends before the current stream goes on behind this context. Another memory may capture the same
    stream, so that all its uses hold the lock of captures."""

    def __init__(self, memory: Memory | None) -> None:
        self._side = None if memory is None else memory.copies
        self._uses: AbstractContextManager[object] = nullcontext() if self._side is None else _one_capture
        self._main: Any = None
        self._brought: Any = None
        self._appended: Any = None

    def __enter__(self) -> _Copies:
        if self._side is not None:
            self._main = torch.cuda.current_stream(self._side.device)
            with self._uses:
                self._side.wait_stream(self._main)
        return self

    def bring(self, move: Move) -> None:
        """Copy a chunk to the memory, whose half nobody reads any more: the output of the replay that did was taken."""
        with self._uses, on(self._side):
            copy_blocks(move.given)
            if self._side is not None:
                self._brought = self._side.record_event()

    def brought(self) -> None:
        """What is launched next waits for the chunk that was copied last."""
        if self._side is not None:
            self._main.wait_event(self._brought)

    def appended(self) -> None:
        """The next `take` waits for what was launched so far."""
        if self._side is not None:
            self._appended = self._main.record_event()

    def take(self, move: Move) -> None:
        """Copy the chunk's output from the memory."""
        with self._uses, on(self._side):
            if self._side is not None:
                self._side.wait_event(self._appended)
            move.output.copy_(move.result)

    def __exit__(self, *_: object) -> None:
        if self._side is not None:
            with self._uses:
                self._main.wait_stream(self._side)


@contextmanager
def _no_collection() -> Iterator[None]:
    """A context without garbage collection: garbage may hold pinned memory, and to free that is an error in a capture.
    """
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collects:
            gc.enable()


def captured(function: Callable[[], object], memory: Pool) -> Callable[[], None]:
    """Capture a call without running it. Returns what runs it."""
    graph, stream = torch.cuda.CUDAGraph(), torch.cuda.current_stream()
    # Outside of inference mode, in which PyTorch's random generator could not be captured again in another mode.
    with _one_capture, _no_collection(), torch.inference_mode(False), torch.no_grad(), torch.cuda.stream(memory.stream):
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
        stream.wait_stream(memory.stream)                              # before another memory may capture it
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


def in_words(one: Tensor, other: Tensor) -> tuple[Tensor, Tensor]:
    """Views of two tensors of a dtype, with the largest elements that both layouts allow: copies take less time."""
    for dtype in (torch.complex128, torch.int64, torch.int32):
        size = dtype.itemsize // one.itemsize
        if size > 1 and all(_fits(tensor, size) for tensor in (one, other)):
            return one.view(dtype), other.view(dtype)
    return one, other


def _fits(tensor: Tensor, size: int) -> bool:
    """Whether `size` elements next to each other can be one."""
    *strides, last = tensor.stride()
    places = tensor.shape[-1], tensor.storage_offset(), tensor.data_ptr() // tensor.itemsize, *strides
    return last == 1 and all(place % size == 0 for place in places)


def _places(buffers: tuple[Tensor, ...]) -> tuple[tuple[int, ...], ...]:
    return tuple((tensor.data_ptr(), *tensor.shape, *tensor.stride()) for tensor in buffers)


def _power_of_two(number: int) -> int:
    """The largest one up to `number`, and at least 1."""
    return 1 << max(0, number.bit_length() - 1)
