"""Processes that form process groups, and run a function at the same time."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection, Listener
from pathlib import Path
from typing import Any

import torch

from .. import stats

SECONDS = 300  # for an answer; on a GPU, a call may compile kernels


class Died(RuntimeError):
    """A rank ended, or did not answer in time."""


class Pool:
    """`size` ranks, on as many GPUs if `device` is "cuda" (then they use NCCL), or on the CPU (gloo). Use in `with`."""

    def __init__(self, size: int, device: str) -> None:
        self.size = size
        self._folder = tempfile.TemporaryDirectory(prefix="kvtwin-ranks-")
        address = str(Path(self._folder.name) / "parent")
        self._listener = Listener(address, "AF_UNIX")
        meet = f"file://{Path(self._folder.name) / 'meet'}"
        command = [sys.executable, "-m", "kvtwin.conformance.lab.worker", address, meet, str(size), device]
        # gloo would otherwise look for a network interface by the host's name, which need not resolve.
        environ = {**os.environ, "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
        self._processes = [subprocess.Popen([*command, str(rank)], env=environ) for rank in range(size)]
        self._connections: list[Connection] = []

    def __enter__(self) -> Pool:
        self._listener._listener._socket.settimeout(SECONDS)  # type: ignore[attr-defined]
        try:
            found = {}
            for _ in range(self.size):
                connection = self._listener.accept()
                found[connection.recv()] = connection
        except BaseException:
            self.__exit__()
            raise
        self._connections = [found[rank] for rank in range(self.size)]
        return self

    def __exit__(self, *_: object) -> None:
        for connection in self._connections:
            connection.close()
        for process in self._processes:
            process.kill()
            process.wait()
        self._listener.close()
        self._folder.cleanup()

    def first(self, ranks: int) -> Part:
        """The first `ranks` ranks, as if there were no others."""
        return Part(self, ranks)

    def run(self, function: Callable[..., Any], *arguments: Any) -> list[Any]:
        """What `function(process_group, *arguments)`, of a module, returns on each rank. Raises the error of the first
        rank that has one. The judge sees the same decisions on all ranks that it runs on: they count once."""
        return self._run(self.size, function, arguments)

    def _run(self, ranks: int, function: Callable[..., Any], arguments: tuple[Any, ...]) -> list[Any]:
        for connection in self._connections[:ranks]:
            connection.send((function, arguments, ranks))
        answers = []
        for rank, connection in enumerate(self._connections[:ranks]):
            try:
                if not connection.poll(SECONDS):
                    raise EOFError
                answers.append(connection.recv())
            except (EOFError, OSError):
                raise Died(f"rank {rank} of {ranks} ended, or did not answer within {SECONDS} s") from None
        running = stats.current()
        if running is not None:
            running.add(max((counted for _, _, counted in answers), key=lambda counted: counted.total))
        for _, error, _ in answers:
            if error is not None:
                raise error
        return [result for result, _, _ in answers]


class Part:
    """Some of the ranks of a pool, with a process group of their own. Starting processes takes longer than most tests,
    so tests with different numbers of ranks share a pool."""

    def __init__(self, pool: Pool, size: int) -> None:
        self._pool, self.size = pool, size

    def run(self, function: Callable[..., Any], *arguments: Any) -> list[Any]:
        """See `Pool.run`."""
        return self._pool._run(self.size, function, arguments)


@contextmanager
def one_rank(device: torch.device) -> Iterator[Any]:
    """A process group of this process alone."""
    distributed = torch.distributed
    backend = "nccl" if device.type == "cuda" else "gloo"
    store = distributed.HashStore()  # type: ignore[attr-defined]
    distributed.init_process_group(backend, store=store, rank=0, world_size=1)
    try:
        yield distributed.group.WORLD
    finally:
        distributed.destroy_process_group()


def most_ranks(device: torch.device) -> int:
    """How many ranks this machine can have: as many as it has GPUs, or 4 on the CPU."""
    return torch.cuda.device_count() if device.type == "cuda" else 4
