"""``python -m kvtwin.conformance.tool.kernel_launches``: print a line for every launch of every kernel.

The first line names the interpreter. The line of a launch has the kernel's module and name, and a hash of its tensor
arguments after the launch. Two processes print the same lines if their interpreters compute the same bits:
test_interpreter_kernels.py compares the accelerated interpreter with the plain one. The kernels and calls are those of
lab/compile_only.py.
"""

from __future__ import annotations

import argparse
import hashlib
import itertools
import os
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import cache
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from .. import discovery, interpreter, registry
from ..judge import checkers

#: Each method is called with this dtype and head_dim. Some kernels do not support a smaller head_dim.
DTYPE, HEAD_DIM = torch.bfloat16, 64
#: Arguments that hold memory addresses, which differ between processes, by the kernels' module.
ADDRESSES = {"kvtwin.optimized.synckv._offload_kernels": ("banks",)}


def contents(tensor: Tensor) -> bytes:
    """The bytes of a tensor. All NaNs have the same bytes."""
    tensor = tensor.detach().contiguous()
    if tensor.is_floating_point() and tensor.element_size() > 1:
        tensor = torch.where(tensor.isnan(), torch.tensor(torch.nan, dtype=tensor.dtype), tensor)
    return bytes(tensor.flatten().view(torch.uint8).numpy())


def digest(given: Mapping[str, Any]) -> str:
    state = hashlib.sha256()
    for name, value in sorted(given.items()):
        if isinstance(value, Tensor):
            state.update(f"{name} {value.dtype} {tuple(value.shape)}".encode() + contents(value))
    return state.hexdigest()[:16]


def print_launches() -> None:
    """Patch the interpreter to print a line after each launch."""
    from triton.runtime.interpreter import GridExecutor

    launch = GridExecutor.__call__

    def launch_and_print(self: Any, *arguments: Any, **named: Any) -> Any:
        result = launch(self, *arguments, **named)
        module = self.fn.__module__
        given = {**dict(zip(self.arg_names, arguments, strict=False)), **named}
        same = {name: value for name, value in given.items() if name not in ADDRESSES.get(module, ())}
        print(f"{module}.{self.fn.__name__} {digest(same)}")
        return result

    GridExecutor.__call__ = launch_and_print


@contextmanager
def few_calls() -> Iterator[None]:
    """Make fewer calls that still launch every kernel. All sizes are equal, so choices by size alternate instead."""
    from ..harness.kernel_keys import modules

    ask = checkers.ask

    @cache
    def arguments(name: str) -> Callable[..., Any]:
        return cache(ask(name, "arguments", lambda device: {}))

    def asked(name: str, what: str, other: Any) -> Any:
        if what == "arguments":  # made once for all calls
            return arguments(name)
        found = ask(name, what, other)
        return found[-1:] if what == "COMPILED" else found

    def zeroed(make: Callable[..., Tensor]) -> Callable[..., Tensor]:
        return lambda *sizes, **options: make(*sizes, **options).zero_()

    with ExitStack() as stack:
        for owner, name in ((torch, "empty"), (torch, "empty_like"), (Tensor, "new_empty")):
            # Memory that no kernel writes to is hashed too, so it must have defined contents.
            stack.enter_context(mock.patch.object(owner, name, zeroed(getattr(owner, name))))
        for module in modules():
            if hasattr(module, "fused"):
                ways = itertools.cycle([True, False])
                stack.enter_context(mock.patch.object(module, "fused", lambda *_, ways=ways: next(ways)))
        for owner in (registry, checkers):
            stack.enter_context(mock.patch.object(owner, "ask", asked))
        yield


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("methods", nargs="*", metavar="METHOD", help="default: all")
    chosen = parser.parse_args(arguments)
    os.environ[interpreter.INTERPRET] = "1"
    print(interpreter.prepare())
    from ..lab import compile_only

    warnings.simplefilter("ignore")
    print_launches()
    with few_calls():
        for pair in discovery.pairs():
            if not chosen.methods or pair.name in chosen.methods:
                compile_only.call_all(pair, DTYPE, (HEAD_DIM,), optional=(True,))
                compile_only.call_on_ranks(pair, DTYPE, (HEAD_DIM,))
    return 0


if __name__ == "__main__":
    sys.exit(main())
