"""The keys of kernels in Triton's cache, which must not depend on what a process called before.

Triton (3.6, 3.7) puts the constants that a kernel reads into its key: those of its own module, and those of a device
function that it calls, but only if that function's own key was already computed. So a process that uses the kernels in
another order looks for other keys, and compiles the same kernels again. The processes of a run use them in many orders.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Iterator
from types import ModuleType

from .. import discovery


def compute_keys() -> None:
    """Compute the keys of all kernels and device functions of kvtwin, in one order.

    Imports the modules of the optimized side. Without effect on keys that were computed before. Not for the
    interpreter, whose kernels have no keys.
    """
    from triton.runtime.jit import JITFunction

    for module in modules():
        for value in list(vars(module).values()):
            if isinstance(value, JITFunction):
                value.cache_key  # noqa: B018  # computed and stored at the first access


def modules(package: str = discovery.OPTIMIZED) -> Iterator[ModuleType]:
    """The modules of the optimized side, without those that need transformers."""
    found = importlib.import_module(package)
    yield found
    for inner in pkgutil.iter_modules(getattr(found, "__path__", ())):
        if inner.name != "hf":
            yield from modules(f"{package}.{inner.name}")
