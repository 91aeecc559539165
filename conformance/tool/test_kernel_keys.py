"""The keys of kernels in Triton's cache do not depend on the order of their use: harness/kernel_keys.py."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from kvtwin.conformance.harness import kernel_keys, suite

#: Computes all keys in two orders, without and with `compute_keys`, each time from the beginning.
KEYS = """
import json
import random
from triton.runtime.jit import JITFunction
from kvtwin.conformance.harness import kernel_keys
from kvtwin.conformance.harness.kernel_keys import modules

found = {(value.fn.__module__, value.__name__): value
         for module in modules() for value in vars(module).values() if isinstance(value, JITFunction)}

def keys(seed, settled):
    for function in found.values():
        function.hash, function.used_global_vals = None, {}
    if settled:
        kernel_keys.compute_keys()
    order = sorted(found)
    random.Random(seed).shuffle(order)
    computed = {name: found[name].cache_key for name in order}
    return [computed[name] for name in sorted(found)]

print(json.dumps({
    "kernels": len(found),
    "unsettled": sum(a != b for a, b in zip(keys(1, False), keys(2, False))),
    "settled": sum(a != b for a, b in zip(keys(1, True), keys(2, True))),
}))
"""


@pytest.mark.slow_on_cpu
def test_keys_do_not_depend_on_the_order_of_use():
    """Without `compute_keys`, they do; a release of Triton in which they do not needs no harness/kernel_keys.py."""
    environment = {**os.environ, "TRITON_INTERPRET": "0"}
    done = subprocess.run([sys.executable, "-c", KEYS], env=environment, capture_output=True, text=True, check=True)
    found = json.loads(done.stdout)
    assert found["kernels"] > 250
    assert found["unsettled"] > 0
    assert found["settled"] == 0


@pytest.mark.parametrize("interpreter", [False, True])
def test_a_run_on_a_gpu_computes_them_before_it_collects(monkeypatch, interpreter):
    calls = []
    monkeypatch.setattr(kernel_keys, "compute_keys", lambda: calls.append("compute_keys"))
    one = object.__new__(suite.Suite)
    one.freezes = False
    one.backend = type("Backend", (), {"interpreter": interpreter})
    hook = one.pytest_collection()
    next(hook)
    assert calls == ([] if interpreter else ["compute_keys"])
    with pytest.raises(StopIteration):
        hook.send(None)
