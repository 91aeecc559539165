"""KV-cache compression methods, each implemented twice, and a judge of these implementations and of yours.

kvtwin.reference      eager PyTorch, as the papers define the methods; kvtwin.reference.hf has caches for transformers
kvtwin.optimized      the same names as Triton kernels; kvtwin.optimized.hf has the same caches
kvtwin.conformance    the suite, whose `api` judges implementations in tests of your own

On the command line, `kvtwin verify METHOD --impl MODULE` judges your implementation of a method.
"""

from typing import Any


def __getattr__(name: str) -> Any:
    if name == "__version__":
        from importlib.metadata import version

        return version("kvtwin")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
