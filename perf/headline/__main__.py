"""Runs the headline experiments: python -m perf.headline. See the package."""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from .. import (
    bench_cake,
    bench_epikv,
    bench_keydiff,
    bench_longflow,
    bench_quest,
    bench_synckv,
    bench_thinkv,
)
from . import EXPERIMENTS
from .base import Run

BENCHES = (
    bench_cake, bench_epikv, bench_keydiff, bench_longflow, bench_quest, bench_synckv, bench_thinkv,
)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m perf.headline", description="The papers' headline experiments.")
    parser.add_argument("--only", action="append", choices=EXPERIMENTS, metavar="NAME", help=", ".join(EXPERIMENTS))
    parser.add_argument("--out", type=Path, default=Path("headline-results"), help="folder for one JSON per experiment")
    parser.add_argument("--tiny", action="store_true", help="run tiny sizes, as a test; the figures are meaningless")
    parser.add_argument("--device", default="cuda")
    options = parser.parse_args(arguments)
    if options.device.startswith("cuda") and not torch.cuda.is_available():
        parser.error(f"--device={options.device}: torch {torch.__version__} finds no CUDA device")
    complaints = []
    for name in options.only or EXPERIMENTS:
        complaints += run_one(name, options.out, options.device, tiny=options.tiny)
    for text in complaints:
        print(f"complaint: {text}", file=sys.stderr)
    return 1 if complaints else 0


def run_one(name: str, out: Path, device: str, *, tiny: bool = False) -> list[str]:
    """Run one experiment, write its JSON to `out`, and return its complaints."""
    run = Run(name, out, device, tiny=tiny)
    with torch.no_grad(), run.part(name), _benches_on(device):
        importlib.import_module(f".{name}", __package__).run(run)
    run.finished = True
    run.write()
    return [f"{name}: {text}" for text in run.complaints]


@contextmanager
def _benches_on(device: str) -> Iterator[None]:
    """Set the device of the benchmark modules, whose checks and states the experiments use."""
    before = [bench.DEVICE for bench in BENCHES]
    for bench in BENCHES:
        bench.DEVICE = device
    try:
        yield
    finally:
        for bench, was in zip(BENCHES, before, strict=True):
            bench.DEVICE = was


if __name__ == "__main__":
    sys.exit(main())
