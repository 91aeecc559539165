"""The bytes that a SyncKV state reports, compared with the bytes that are allocated. On a GPU, torch's allocators for
device and pinned memory count them. On the CPU, a registry counts every storage that is still alive."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from kvtwin.reference.synckv import SyncKVConfig

pytestmark = pytest.mark.kind("equivalence")

SIZES = {"batch": 1, "query_heads": 3, "key_value_heads": 3, "head_dim": 16, "dtype": torch.float32}


#: To read a number from a GPU, torch pins a word of 8 bytes, and its statistics keep counting it. Fewer than 128
#: numbers are read here. The smallest bank has a thousand times as many bytes.
WORDS = 8 * 128

#: torch allocates GPU memory in blocks of a multiple of 512 bytes. It may take a free block that is larger than it
#: needs: for a request of more than 1 MiB, by up to 1 MiB.
BLOCK, LARGEST_REST = 512, 2**20


def slots(device: torch.device) -> int:
    """The number of slots. On a GPU, so many that keys and values have large blocks, and not a power of two."""
    return 20_000 if device.type == "cuda" else 100


SIDES = pytest.mark.parametrize(("side", "offload"), [("reference", False), ("optimized", False), ("optimized", True)])


class Registry(TorchDispatchMode):
    """Records every storage that an operation returns while this mode is on. It does not see storages inside our custom
    operations, which are freed when the operation returns."""

    def __init__(self) -> None:
        super().__init__()
        self.made: dict[int, tuple[StorageWeakRef, int]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        # torch.tensor() allocates its storage first, and then passes it to this operation.
        given = () if func is torch.ops.aten.lift_fresh.default else (args, kwargs)
        known = {leaf.untyped_storage()._cdata for leaf in tree_leaves(given) if isinstance(leaf, Tensor)}
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor) and leaf.untyped_storage()._cdata not in known:
                storage = leaf.untyped_storage()
                self.made[storage._cdata] = StorageWeakRef(storage), storage.nbytes()
        return result

    def live(self) -> int:
        return sum(size for reference, size in self.made.values() if not reference.expired())


class Taken(NamedTuple):
    """Bytes on the GPU as requested and as allocated, bytes on the host, and blocks on the GPU for requests of up to
    1 MiB and for larger ones."""

    requested: int
    allocated: int
    host: int
    small: int = 0
    large: int = 0


class Count:
    """The memory allocated since construction. On the CPU, all of it is host memory."""

    def __init__(self, device: torch.device, registry: Registry) -> None:
        self._device, self._registry = device, registry
        self._before = self._now()

    def _now(self) -> Taken:
        gc.collect()
        if self._device.type != "cuda":
            return Taken(0, 0, self._registry.live())
        torch.cuda.synchronize(self._device)
        # Memory in torch's cache counts as allocated, so empty the cache. "active" bytes do not decrease in torch 2.11.
        torch._C._host_emptyCache()
        stats, host = torch.cuda.memory_stats(self._device), torch.cuda.host_memory_stats()
        return Taken(
            stats["requested_bytes.all.current"], stats["allocated_bytes.all.current"], host["allocated_bytes.current"],
            stats["allocation.small_pool.current"], stats["allocation.large_pool.current"],
        )

    def taken(self) -> Taken:
        return Taken(*(now - before for now, before in zip(self._now(), self._before, strict=True)))


@pytest.fixture
def count(device: torch.device) -> Iterator[Callable[[], Count]]:
    gc.collect()
    gc.freeze()  # so that each further collection looks at new objects only
    with Registry() as registry:
        yield lambda: Count(device, registry)


def fed(state: Any, device: torch.device) -> None:
    """A prompt and an anticipation."""
    prompt, *steps = ([torch.full((1, 3, *time, 16), 0.5, device=device) for _ in range(3)] for time in ((6,), (), ()))
    state.prefill(*prompt)
    for given in steps:
        state.step(*given)


def assert_agree(state: Any, taken: Taken) -> None:
    """The reported bytes equal the requested bytes (pinned memory: up to WORDS). On a GPU, allocated blocks exceed them
    by at most what torch's rule for blocks allows."""
    gpu_bytes, host_bytes = state.gpu_bytes(), state.host_bytes()
    if state.device.type == "cuda":
        assert gpu_bytes == taken.requested
        assert host_bytes <= taken.host <= host_bytes + WORDS
        rest = BLOCK * (taken.small + taken.large) + LARGEST_REST * taken.large
        assert 0 <= taken.allocated - gpu_bytes <= rest
        assert taken.large or state.config.offload, "keys and values have large blocks"
    else:
        assert gpu_bytes + host_bytes == taken.host


def assert_each_buffer_counts(state: Any, taken: Taken) -> None:
    """Hiding any buffer makes `assert_agree` fail, except for buffers with two names."""
    parts = [vars(state), *([vars(state._offload)] if state.config.offload else [])]
    named = [(part, name, value.untyped_storage().data_ptr()) for part in parts for name, value in part.items()
             if isinstance(value, Tensor) and value.numel()]
    once = [(part, name) for part, name, where in named if [other for *_, other in named].count(where) == 1]
    assert len(once) >= 8
    for part, name in [*once, *((part, "bank") for part in parts[1:])]:
        hidden, part[name] = part[name], None
        with pytest.raises(AssertionError):
            assert_agree(state, taken)
        part[name] = hidden


@SIDES
def test_reported_bytes_equal_allocated_bytes(side, offload, twins, device, count):
    """For an empty state, after a prompt and steps (with a bank), after a reset, and after the state is deleted."""
    config = SyncKVConfig(8, stride=2, clusters=1, max_tokens=slots(device), offload=offload)

    def new() -> Any:
        return getattr(twins, side).synckv.SyncKVState(config, **SIZES, device=device)

    cache = 2 * 3 * slots(device) * 16 * 4
    if device.type == "cuda":
        first = new()                                           # allocations that happen once
        fed(first, device)
        first.reset()
        del first
    begun = count()
    state = new()
    assert_agree(state, begun.taken())
    empty = state.gpu_bytes()
    assert state.host_bytes() == 0, "a state without tokens needs no bank"
    fed(state, device)
    assert_agree(state, begun.taken())
    assert state.host_bytes() >= cache * 2 // 3 if offload else state.host_bytes() == 0
    assert state.gpu_bytes() >= (cache // 3 if offload else cache), "representatives keep all tokens"
    assert_each_buffer_counts(state, begun.taken())
    state.reset()
    assert_agree(state, begun.taken())
    assert (state.gpu_bytes(), state.host_bytes()) == (empty, 0)
    del state
    left = begun.taken()
    assert left[:2] == left[3:] == (0, 0)
    assert left.host == 0 or (device.type == "cuda" and left.host <= WORDS)
