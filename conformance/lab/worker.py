"""``python -m kvtwin.conformance.lab.worker``: a rank of a pool.

It runs what its parent sends until that is gone.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from datetime import timedelta
from multiprocessing.connection import Client
from typing import Any

from .. import interpreter


def main(arguments: Sequence[str]) -> None:
    address, meet, size, device, rank = arguments
    connection = Client(address, "AF_UNIX")
    connection.send(int(rank))
    interpreter.prepare()

    import torch
    from torch import distributed

    if device == "cuda":
        torch.cuda.set_device(int(rank))
    distributed.init_process_group(
        "nccl" if device == "cuda" else "gloo", init_method=meet, rank=int(rank), world_size=int(size),
        timeout=timedelta(seconds=240),  # processes that start on busy cores
    )
    groups = {ranks: distributed.new_group([*range(ranks)]) for ranks in range(1, int(size) + 1)}
    while True:
        try:
            function, given, ranks = connection.recv()
        except (EOFError, OSError):  # the parent ended
            return
        connection.send(answer(function, groups[ranks], given))


def answer(function: Any, group: Any, given: tuple[Any, ...]) -> tuple[Any, Exception | None, Any]:
    """What a function returns or raises, and the decisions that it counted."""
    import pytest

    from .. import stats

    with stats.collect() as counted:
        try:
            return function(group, *given), None, counted
        except pytest.fail.Exception as failure:  # no Exception to Python: pytest.raises saw none
            return None, AssertionError(str(failure)), counted
        except Exception as error:
            error.add_note(f"on rank {group.rank()} of {group.size()}")
            return None, _sendable(error), counted


def _sendable(error: Exception) -> Exception:
    import pickle

    try:
        pickle.loads(pickle.dumps(error))
    except Exception:
        return RuntimeError(f"{type(error).__name__}: {error}")
    return error


if __name__ == "__main__":
    main(sys.argv[1:])
