"""``python -m kvtwin.conformance.lab.launch``: launch every kernel on a GPU with two sizes of tensors.

It prints a line per kernel: its module and name, and the number of launches. sanitize.py runs it under
compute-sanitizer. Results are not checked here.
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import torch

from .. import discovery
from ..cases import every_call, tiny
from . import compile_only

#: Larger tensors or not, their dtype, and the head_dim of states (None: that of the tensors).
SIZES = ((False, torch.bfloat16, 64), (True, torch.float32, None))


def count_launches() -> Counter[str]:
    """From now on count the launches of kernels, by module and name."""
    from triton.runtime import jit

    counted: Counter[str] = Counter()
    launch = jit.JITFunction.run

    def run(kernel: Any, *arguments: Any, **options: Any) -> Any:
        counted[f"{kernel.fn.__module__}.{kernel.__name__}"] += 1
        return launch(kernel, *arguments, **options)

    jit.JITFunction.run = run
    return counted


def launch_all(pair: discovery.Pair, device: torch.device) -> None:
    """Make every call of a pair with both sizes, and with the kernels for few and for many KV heads."""
    for large, dtype, head_dim in SIZES:
        with tiny.larger() if large else nullcontext():
            for fused in compile_only.ways(pair):
                with compile_only.fused_as(pair, fused):
                    for call in every_call.calls_of(pair, device, dtype, (head_dim or tiny.HEAD_DIM,), (True,)):
                        call.run()
    torch.cuda.synchronize(device)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("methods", nargs="*", metavar="METHOD", help="default: all")
    chosen = parser.parse_args(arguments)
    counted = count_launches()
    for pair in discovery.pairs():
        if not chosen.methods or pair.name in chosen.methods:
            launch_all(pair, torch.device("cuda", torch.cuda.current_device()))
            print(f"{pair}: {sum(counted.values())} launches so far", flush=True)
    for name, number in sorted(counted.items()):
        print(name, number)
    return 0


if __name__ == "__main__":
    sys.exit(main())
