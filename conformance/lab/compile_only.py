"""Compile every kernel for a GPU on a machine without one: python -m kvtwin.conformance.lab.compile_only

The interpreter accepts code that the compiler rejects, such as a variable that changes its shape in a loop, or a layout
that cannot be converted. This command calls every operation of every pair, as test_twins_torch.py does, on CPU tensors
and with a stand-in for Triton's driver that names a GPU. Kernels are compiled to machine code and never launched, so
their results are not checked. The generated code is checked for three errors that random inputs rarely show: a kernel
must sum the logits of equal keys in one order (`key_orders`), a line that is inlined in two of its loops must round
alike in both (`fused_here_only`), and a kernel must not have both operations in which lanes of a warp may diverge and
matrices that whole warps access (`diverging_operations`).
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import inspect
import os
import re
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from itertools import product
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest import mock

import torch

from .. import discovery
from ..discovery import Pair
from ..harness.kernel_keys import modules

CAPABILITY = 90
WARP = 32
#: The shared memory available to a program, in bytes: 227 KB.
SHARED = 232448
#: Head dims of states. Larger ones give larger tiles, which need more shared memory.
HEAD_DIMS = (16, 128)
DTYPES = (torch.float32, torch.bfloat16)
#: Kernels whose logits only enter sums, not the score of a token, so that no tie depends on them.
SUMS_ALONE = ("attention_kernel",)
#: The files of device functions that kernels call for several purposes.
HELPERS = ("numerics.py", "softmax.py")
#: Replacements, in every module of the optimized side, for functions that query the GPU: an H200's answers.
ANSWERS: dict[str, Callable[..., Any]] = {
    "check_kernel_device": lambda *_: None, "multiprocessors": lambda _: 132, "discards": lambda _: True,
    "launches_early": lambda _: True, "converts_e4m3": lambda _: True,
}


class Driver:
    """The part of Triton's driver that compilation uses."""

    def __init__(self, capability: int) -> None:
        from triton.backends.compiler import GPUTarget

        self._target = GPUTarget("cuda", capability, WARP)

    def get_current_target(self) -> Any:
        return self._target

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_active_torch_device(self) -> torch.device:
        return torch.device("cpu")


def key_orders(code: str) -> dict[str, set[str]]:
    """The orders in which a kernel's dots sum the products of a query and a key, by the type of the keys.

    Keys are the transposed operands. With two orders in one kernel, equal keys in two of its loops get unequal logits:
    see of_any_width in _common/numerics.py. code: in Triton's GPU dialect, which calls the order kWidth; products
    outside tensor cores have none.
    """
    transposed = set(re.findall(r"(%\S+) = tt\.trans ", code))
    orders: dict[str, set[str]] = {}
    for operand, keys, order in re.findall(r"tt\.dot %\S+, (%\S+), .*? \* tensor<(\w+), .*?kWidth = (\d+)", code):
        if operand in transposed:
            orders.setdefault(keys, set()).add(order)
    return orders


def fused_here_only(code: str, folder: Path) -> set[str]:
    """Lines of kernels in a folder that are inlined several times and fused differently.

    Their additions are fused with the preceding product in one place and not in another, for example because of a mask
    between them. Then equal tokens in different loops differ in the last bit; `tl.fma` prevents that. code: PTX with
    line information. Triton up to 3.8 lists all callers of a line, later versions the next caller.
    """
    files = {number: Path(name) for number, name in re.findall(r'\.file\s+(\d+) "(.*)"', code)}
    places: dict[tuple[str, ...], dict[tuple[str, ...], set[str]]] = {}
    here: set[str] = set()
    for line in code.splitlines():
        if at := re.match(r"\s*\.loc\s+(\d+ \d+ \d+)(.*)", line):
            callers = tuple(re.findall(r"inlined_at (\d+ \d+ \d+)|@\[ (\S+)", at[2]))
            here = places.setdefault(tuple(at[1].split()), {}).setdefault(callers, set())
        elif addition := re.match(r"\s*(fma|add|sub)\.(?:\w+\.)*f32", line):
            here.add("fused" if addition[1] == "fma" else "apart")
    found = set()
    for (file, number, _), kinds in places.items():
        if number == "0":                                              # attributed to several lines
            continue
        fused, apart = ([callers for callers, kind in kinds.items() if kind == {only}] for only in ("fused", "apart"))
        # Compare calls of a helper only for the same purpose.
        first = 1 if files[file].name in HELPERS else 0
        if files[file].is_relative_to(folder) and any(_in_two_loops(*pair, first) for pair in product(fused, apart)):
            found.add(files[file].read_text(encoding="utf-8").splitlines()[int(number) - 1].strip())
    return found


def diverging_operations(code: str) -> set[str]:
    """The operations in which lanes of a warp may diverge, if the code also has stmatrix or ldmatrix anywhere; else
    empty. Lanes that have not reconverged make an illegal memory access, for some numbers only. code: PTX.

    Integers are left out: their division branches for numbers beyond 32 bits alone.
    """
    if not re.search(r"^\s*(?:@\S+\s+)?(?:st|ld)matrix\.", code, re.M):
        return set()
    return set(re.findall(r"\b(?:div|sqrt|rcp)\.rn\.f(?:32|64)", code))


def _in_two_loops(one: Sequence[object], other: Sequence[object], first: int) -> bool:
    """Whether two call chains of a line, from its caller up, differ in exactly one call, at `first` or later."""
    differ = [i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b]
    return len(one) == len(other) and len(differ) == 1 and differ[0] >= first


class Compiled:
    """The compiled kernels, counted by name, and the compiler's errors."""

    def __init__(self) -> None:
        self.folder = Path(*importlib.import_module(discovery.OPTIMIZED).__path__)
        self.done: Counter[str] = Counter()
        self.refused: dict[str, str] = {}
        self.seconds = 0.0

    def listed_instead(self, kernel: Any) -> None:
        """Replaces a launch if kernels are only listed: counts the kernel by module and name."""
        self.done[f"{kernel.fn.__module__}.{kernel.__name__}"] += 1

    def instead_of_launching(self, run: Callable[..., Any]) -> Callable[..., Any]:
        def compile_only(kernel: Any, *arguments: Any, grid: Any, warmup: bool, **options: Any) -> None:
            start, name = time.perf_counter(), kernel.__name__
            try:
                made = run(kernel, *arguments, grid=grid, warmup=True, **options)
                if made.metadata.shared > SHARED:
                    raise MemoryError(f"expected at most {SHARED} bytes of shared memory, got {made.metadata.shared}")
                for keys, orders in key_orders(made.asm["ttgir"]).items():
                    if len(orders) > 1 and name not in SUMS_ALONE:
                        raise ArithmeticError(f"logits of keys {keys} are summed in orders {sorted(orders)}")
                if lines := fused_here_only(made.asm["ptx"], self.folder):
                    raise ArithmeticError(f"fused with a product in one loop and not in another: {sorted(lines)}")
                if operations := diverging_operations(made.asm["ptx"]):
                    raise RuntimeError(f"lanes may diverge in {sorted(operations)}, and whole warps access matrices")
                self.done[name] += 1
            except Exception as error:  # the compiler's errors have no common base
                self.refused.setdefault(name, "\n".join(_causes(error)))
            self.seconds += time.perf_counter() - start

        return compile_only


def _causes(error: BaseException | None) -> list[str]:
    """The messages of an exception and its causes, the innermost first."""
    said = []
    while error is not None:
        said.append(f"{type(error).__name__}: {str(error)[-1500:]}")
        error = error.__cause__
    return said[::-1]


def stand_in(capability: int, *, listed: bool = False) -> Compiled:
    """From now on compile the kernels of this process instead of launching them; if `listed`, only count them.

    Raises RuntimeError under Triton's interpreter.
    """
    from triton.runtime import driver, jit

    from ...optimized._common import launch as _launch

    if _launch.INTERPRETED:
        raise RuntimeError("TRITON_INTERPRET is set, so kernels are not compiled; unset it")
    driver.set_active(Driver(capability))
    compiled = Compiled()
    if listed:
        jit.JITFunction.run = lambda kernel, *arguments, **options: compiled.listed_instead(kernel)
    else:
        jit.JITFunction.run = compiled.instead_of_launching(jit.JITFunction.run)
    for module in modules():
        for name, answer in ANSWERS.items():
            if hasattr(module, name):
                setattr(module, name, answer)
    return compiled


def choosing(pair: Pair) -> list[ModuleType]:
    """The modules that use other kernels for many KV heads: a pair's own, and that of block states' steps, unless the
    state's rule leaves it no choice."""
    found = [module for module in modules(pair.optimized.__name__) if hasattr(module, "fused")]
    step: Any = importlib.import_module(f"{discovery.OPTIMIZED}._common.block_cache.step")
    rule = getattr(getattr(pair.optimized, pair.state.__name__), "_rule", None) if pair.state else None
    return [*found, step] if rule in step.RULES and rule not in step.BARE else found


def ways(pair: Pair) -> tuple[bool, ...]:
    """The arguments of `fused_as` that make a difference: for block states both, since they choose evictions by other
    kernels in long caches."""
    blocks: Any = importlib.import_module(f"{discovery.OPTIMIZED}._common.block_cache.state")
    state = getattr(pair.optimized, pair.state.__name__) if pair.state else object
    return (False, True) if choosing(pair) or issubclass(state, blocks.BlockState) else (False,)


@contextlib.contextmanager
def fused_as(pair: Pair, value: bool) -> Iterator[None]:
    """Use the kernels for many KV heads and long caches, or those for few and short ones, whatever the sizes."""
    ops: Any = importlib.import_module(f"{discovery.OPTIMIZED}._common.block_cache.ops")

    def at_once(end: int, count: int) -> bool:
        return count > 1 and not value

    with contextlib.ExitStack() as stack:
        stack.enter_context(mock.patch.object(ops, "at_once", at_once))
        for module in choosing(pair):
            stack.enter_context(mock.patch.object(module, "fused", return_value=value))
        yield


def compile_pair(
    pair: Pair, dtype: torch.dtype, head_dims: Sequence[int] = HEAD_DIMS, *, ranks: bool = True
) -> None:
    """Call every function and the state of a pair with tensors of this dtype, the state with each head_dim.

    If a pair uses other kernels for many KV heads, call these too, and with `ranks` those for heads on several ranks.
    """
    for fused in ways(pair):
        with fused_as(pair, fused):
            call_all(pair, dtype, head_dims)
    if ranks:
        call_on_ranks(pair, dtype, head_dims)


def call_all(
    pair: Pair, dtype: torch.dtype, head_dims: Sequence[int], optional: Sequence[bool] = (False, True)
) -> None:
    """Make every call of a pair (see every_call.py) on the CPU."""
    from ..cases import every_call

    for call in every_call.calls_of(pair, torch.device("cpu"), dtype, head_dims, optional):
        call.run()


def call_on_ranks(pair: Pair, dtype: torch.dtype, head_dims: Sequence[int]) -> None:
    """Make two steps of the pair's state with a process group of one rank, if it takes one."""
    if pair.state is None or "process_group" not in inspect.signature(pair.state).parameters:
        return
    from ..cases import tiny
    from ..judge import checkers
    from .pool import one_rank

    device = torch.device("cpu")
    with one_rank(device) as group:
        for head_dim in head_dims:
            state = tiny.new_state(pair, pair.optimized, device, dtype=dtype, head_dim=head_dim, process_group=group)
            for seed in range(2):  # ranks may meet at some steps only
                token = [tensor.to(dtype) for tensor in tiny.token(device, seed=seed, head_dim=head_dim)]
                state.step(*token, **checkers.extras(state, *token))


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("methods", nargs="*", metavar="METHOD", help="methods to compile (default: all)")
    parser.add_argument(
        "--head-dim", nargs="+", type=int, default=HEAD_DIMS, metavar="D",
        help="head dims of states (default: 16 128)",
    )
    parser.add_argument(
        "--capability", type=int, default=CAPABILITY, metavar="N",
        help="compute capability of the GPU (default: %(default)s)",
    )
    parser.add_argument("--list", action="store_true", help="list the kernels without compiling them")
    parser.add_argument("--no-ranks", action="store_true", help="leave out kernels that only several ranks launch")
    chosen = parser.parse_args(arguments)
    pairs = {pair.name: pair for pair in discovery.pairs()}
    unknown = [name for name in chosen.methods if name not in pairs]
    if unknown:
        parser.error(f"no method {', '.join(unknown)}; there are: {', '.join(pairs)}")
    os.environ.pop("TRITON_INTERPRET", None)
    compiled = stand_in(chosen.capability, listed=chosen.list)
    broken: dict[str, str] = {}
    for name in chosen.methods or pairs:
        for dtype in DTYPES:
            try:
                compile_pair(pairs[name], dtype, chosen.head_dim, ranks=not chosen.no_ranks)
            except Exception as error:  # kernels do not compute anything here, so the Python code around them may fail
                broken[f"{name}, {dtype}"] = f"{type(error).__name__}: {error}"
        if not chosen.list:
            print(f"{name}: {compiled.seconds:.0f} s, {sum(compiled.done.values())} kernels so far", flush=True)
    for name, number in sorted(compiled.done.items()):
        refused = "  and failed for other arguments" if name in compiled.refused else ""
        print(name if chosen.list else f"{name:32s}{number:4d}{refused}")
    for name, said in {**compiled.refused, **broken}.items():
        print(f"\nFAILED {name}\n{said}", file=sys.stderr)
    return 1 if compiled.refused or broken else 0


if __name__ == "__main__":
    sys.exit(main())
