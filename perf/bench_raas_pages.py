"""Benchmark of RaaS with pages of 16 tokens, as in the authors' code. It has no gate.

When the cache is full, each page that is completed evicts one. `test_interval` times the steps of a page in one graph.
bench_baselines.py has the other benchmarks of RaaS.
"""

from __future__ import annotations

import pytest

from . import blocks

pytestmark = pytest.mark.benchmark(group="raas")

PAGE_SIZE = 16


@pytest.mark.parametrize("shape", blocks.STEPS[:1], ids=str)
def test_interval(device_benchmark, shape):
    blocks.time_interval(device_benchmark, "raas", shape, PAGE_SIZE, gated=False, alpha=None, page_size=PAGE_SIZE)
