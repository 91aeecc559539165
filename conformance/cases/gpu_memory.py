"""Locks of a GPU's memory: tests that take gigabytes of it wait for each other, over all processes that use the GPU.

Many of them at once, in the processes of pytest-xdist, may need more memory than the GPU has.
"""

from __future__ import annotations

import functools
import gc
import os
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

import torch

from ..refusals import EnvironmentLimit

fcntl: Any
try:
    import fcntl
except ImportError:  # not on POSIX: there are no locks
    fcntl = None

#: Seconds to wait for memory before each further call.
PAUSES = (2, 10, 30)

#: Bytes of a GPU for each test that may lock its memory. The largest test takes 25 GB.
SHARE = 32 * 2**30

#: The share of a GPU's memory that other processes need at most: contexts, and what small cases leave in caches.
OF_OTHERS = 0.25

#: Seconds between two attempts to get a lock that several processes may hold.
INTERVAL = 0.05

_held: dict[str, IO[str]] = {}


def lock(name: str, at_once: int = 1) -> None:
    """Wait until fewer than `at_once` other processes hold the lock `name`, and hold it until `release`."""
    if fcntl is None or name in _held:
        return
    while not any(_locks(name, number) for number in range(at_once)):
        time.sleep(INTERVAL)


def _locks(name: str, number: int) -> bool:
    file = (Path(tempfile.gettempdir()) / f"kvtwin-{os.getuid()}-{name}-{number}.lock").open("a")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)  # the system gives it back if the process ends
    except BlockingIOError:
        file.close()
        return False
    _held[name] = file
    return True


def lock_memory(device: torch.device, name: str = "memory", at_once: int | None = None) -> None:
    """Lock a share of a GPU's memory: by default, as many processes may as it has SHAREs. The GPU is known by its
    UUID, since CUDA_VISIBLE_DEVICES may renumber it."""
    gpu = torch.cuda.get_device_properties(device)
    at_once = max(1, gpu.total_memory // SHARE) if at_once is None else at_once
    lock(f"{name}-{getattr(gpu, 'uuid', device.index)}", at_once)


@contextmanager
def between_examples(test: Any, call: Callable[[], None]) -> Iterator[None]:
    """Within it, each case that Hypothesis draws for the test begins with `call()` if this process holds a lock then.

    Without this, a test whose third case takes gigabytes would hold its lock until its last case.
    """
    handle = getattr(test, "hypothesis", None)
    if handle is None:
        yield
        return
    example = handle.inner_test  # for runners, says Hypothesis's documentation

    @functools.wraps(example)
    def begins_without_a_lock(*arguments: Any, **named: Any) -> Any:
        __tracebackhide__ = True
        if is_locked_here():
            call()
        return example(*arguments, **named)

    handle.inner_test = begins_without_a_lock
    try:
        yield
    finally:
        handle.inner_test = example


class TakenMemory(torch.OutOfMemoryError):
    """Raised in place of an implementation's OutOfMemoryError if other processes hold the GPU's memory."""


def bytes_of_others() -> int:
    """Bytes of the current GPU that other processes hold, if that is more than OF_OTHERS of its memory; otherwise 0."""
    free, total = torch.cuda.mem_get_info()
    held = total - free - torch.cuda.memory_reserved()
    return held if held > OF_OTHERS * total else 0


def when_memory_is_free(test: Callable[..., None], /, *arguments: Any, **named: Any) -> None:
    """Call a test. If the processes that share its GPU leave it too little memory, lock the GPU's memory,
    wait until they need less, and call it again, up to len(PAUSES) times. Raises EnvironmentLimit if an implementation
    under test got too little even then."""
    __tracebackhide__ = True
    for pause in PAUSES if shares_its_gpu() else ():
        try:
            test(*arguments, **named)
        except Exception as error:
            if _found(error, torch.OutOfMemoryError) is None:
                raise
        else:
            return
        # Outside of the block above, what the frames of the error hold is free.
        gc.collect()
        torch.cuda.empty_cache()
        lock_memory(torch.device("cuda", torch.cuda.current_device()))
        time.sleep(pause)
    try:
        test(*arguments, **named)
    except Exception as error:
        taken = _found(error, TakenMemory)
        if taken is None:
            raise
        raise EnvironmentLimit(str(taken)) from None


def _found(error: BaseException, kind: type[BaseException]) -> BaseException | None:
    """The error if it is of this kind, or the first such one of a group: Hypothesis calls a failing example again, when
    there may be memory."""
    if isinstance(error, kind):
        return error
    return next(filter(None, (_found(one, kind) for one in getattr(error, "exceptions", ()))), None)


def shares_its_gpu() -> bool:
    """Whether other processes of this run may test on the same GPU."""
    return int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1")) > 1 and torch.cuda.is_initialized()


def is_locked_here() -> bool:
    """Whether this process holds a lock."""
    return bool(_held)


def release() -> None:
    """Release every lock of this process."""
    while _held:
        _held.popitem()[1].close()
