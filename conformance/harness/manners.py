"""What a call of the implementation under test does beside its result: warnings, and settings of the process.

Neither is a mistake in a result. Warnings do not become errors and are not printed; settings are restored, so that the
next call, and the judge, find what they expect. Both are noted, and the verdict lists the notes.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from .. import stats
from . import wording

#: Variables that libraries set at their first use.
OF_LIBRARIES = ("TORCHINDUCTOR_", "TRITON_", "CUBLAS_", "CUDA_", "PYTORCH_", "TORCH_", "KMP_", "OMP_", "NVIDIA_")
#: Where numpy warns of masked lanes of a block, in Triton's interpreter: the kernel discards their results.
INTERPRETER = Path("triton", "runtime", "interpreter.py").parts


@contextmanager
def note_effects(name: str) -> Iterator[None]:
    """Note what the call `name` does beside its result, and undo it."""
    before = _settings()
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            yield
    finally:
        for what, value in _settings().items():
            if value != before[what]:
                stats.record_note(f"{name} changes {what}")
                _restore(what, before[what])
        for one in caught:
            if Path(one.filename).parts[-3:] != INTERPRETER:
                stats.record_note(f"{name} warns: {one.category.__name__}: {wording.first_line(one.message)}")


def _settings() -> dict[str, Any]:
    """What a call might change and must not, by name."""
    import torch

    return {
        "the default dtype": torch.get_default_dtype(), "the default device": torch.get_default_device(),
        "whether gradients are recorded": torch.is_grad_enabled(),
        "whether algorithms are deterministic": (
            torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled(),
        ),
        "the seed of torch's random numbers": torch.initial_seed(),
        "environment variables": {
            name: value for name, value in os.environ.items() if not name.startswith(OF_LIBRARIES)
        },
    }


def _restore(what: str, value: Any) -> None:
    import torch

    if what == "the default dtype":
        torch.set_default_dtype(value)
    elif what == "the default device":
        torch.set_default_device(None if value == torch.device("cpu") else value)
    elif what == "whether gradients are recorded":
        torch.set_grad_enabled(value)
    elif what == "whether algorithms are deterministic":
        torch.use_deterministic_algorithms(value[0], warn_only=value[1])
    elif what == "the seed of torch's random numbers":
        torch.default_generator.manual_seed(value)
    else:
        for name in _settings()[what].keys() - value.keys():
            del os.environ[name]
        os.environ.update(value)
