"""The environment of a run: device, Triton's interpreter, versions, Hypothesis profiles."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pytest

from ..interpreter import FALSE, INTERPRET, Prepared, interprets
from . import naming

if TYPE_CHECKING:
    import torch

DISTRIBUTIONS = ("kvtwin", "torch", "triton", "numpy", "hypothesis", "pytest", "transformers", "safetensors")
HEADER_VERSIONS = ("kvtwin", "python", "torch", "triton", "hypothesis")


@dataclass(frozen=True)
class Backend:
    """The device of the implementation under test. ``why``: the reason for the choice, for the header."""

    device: torch.device
    interpreter: bool
    name: str
    why: str

    def __str__(self) -> str:
        return f"{self.device} ({self.name})"


def choose(requested: str | None) -> Backend:
    """The backend for ``--kv-device``. Without a GPU, turn Triton's interpreter on before triton is imported.

    Raises pytest.UsageError if the request cannot be met. It never changes the device or skips tests silently.
    """
    wants_interpreter = os.environ.get(INTERPRET, "").lower() not in FALSE
    if requested == "cuda" and wants_interpreter:
        raise pytest.UsageError(
            f"{naming.option('--kv-device')} cuda, but {INTERPRET}={os.environ[INTERPRET]} is set, so Triton would "
            "interpret the kernels instead of compiling them; unset it"
        )
    import torch

    has_cuda = torch.cuda.is_available()
    if requested == "cuda" and not has_cuda:
        raise pytest.UsageError(
            f"{naming.option('--kv-device')} cuda, but torch {torch.__version__} sees no CUDA device here"
        )
    if requested == "cuda" or (requested in (None, "auto") and has_cuda and not wants_interpreter):
        _check_triton(interpreted=False)
        device = torch.device("cuda", torch.cuda.current_device())
        return Backend(device, False, torch.cuda.get_device_name(device), "compiled kernels")
    if requested == "cpu":
        why = f"as {naming.option('--kv-device')} says"
    elif has_cuda:
        why = f"{INTERPRET} was set"
    else:
        why = "no CUDA device"
    # If triton was imported without the variable, setting it now would leave half of triton compiled.
    _check_triton(interpreted=True)
    os.environ[INTERPRET] = "1"
    return Backend(torch.device("cpu"), True, "Triton interpreter", why)


def _check_triton(*, interpreted: bool) -> None:
    """Raise pytest.UsageError if triton was already imported in the wrong mode."""
    standard = sys.modules.get("triton.language.standard")
    if standard is None:
        return
    if interprets(standard) == interpreted:
        return
    wanted, cure = (
        (f"with {INTERPRET}=1", f"set {INTERPRET}=1 in the environment") if interpreted
        else (f"without {INTERPRET}", f"unset {INTERPRET}")
    )
    raise pytest.UsageError(
        f"kvtwin needs triton imported {wanted}, but triton was imported otherwise before the tests were collected "
        f"(by a conftest.py, a plugin, or a transformers model imported there); {cure} before pytest starts"
    )


def version(distribution: str) -> str | None:
    """The installed version; None if it is not installed. Imports nothing."""
    if distribution == "python":
        return platform.python_version()
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def describe(backend: Backend) -> dict[str, Any]:
    """The environment part of a report."""
    return {
        "device": str(backend.device),
        "backend": backend.name,
        "interpreter": backend.interpreter,
        "platform": platform.platform(),
        "versions": {name: version(name) for name in ("python", *DISTRIBUTIONS)},
    }


def interpreter_line(prepared: Prepared) -> str:
    """The line about Triton's interpreter."""
    return f"kvtwin interpreter: {prepared}"


def header(backend: Backend, under_test: str, prepared: Prepared | None) -> list[str]:
    """The lines at the top of a run. prepared: None if no kernel is interpreted."""
    versions = ", ".join(f"{name} {version(name) or 'not installed'}" for name in HEADER_VERSIONS)
    interpreter = f", {INTERPRET}=1" if backend.interpreter else ""
    return [
        f"kvtwin: {versions}",
        f"kvtwin device: {backend}, {backend.why}{interpreter}",
        *([] if prepared is None else [interpreter_line(prepared)]),
        f"kvtwin under test: {under_test}",
    ]


#: The names of the profiles.
PROFILES = ("quick", "brief", "ci", "gpu", "default", "thorough", "soak")


def set_up_hypothesis(config: pytest.Config) -> None:
    """Register the PROFILES, and load one.

    Loads the one of --hypothesis-profile; by default ``ci`` if the variable CI is set, else ``default``.
    """
    try:
        from hypothesis import HealthCheck, Phase, settings
    except ImportError:
        raise pytest.UsageError("kvtwin's tests need hypothesis: python -m pip install 'kvtwin[test]'") from None

    common: dict[str, Any] = {
        "deadline": None,  # the interpreter is about a million times slower than a GPU
        "print_blob": True,
        # Implementations under test may refuse most examples (impl.py). A test's settings are made when it is imported,
        # which may be in a run without them.
        "suppress_health_check": [HealthCheck.too_slow, HealthCheck.filter_too_much],
    }
    # Without a GPU shrinking takes minutes, so these profiles report the failure as found.
    found: dict[str, Any] = {"derandomize": True, "database": None, "phases": [Phase.explicit, Phase.generate]}
    settings.register_profile("quick", max_examples=2, **found, **common)
    # About as many examples as quick, but drawn from the seed.
    soak = {**found, "derandomize": False, "phases": [Phase.generate]}
    settings.register_profile("soak", max_examples=4, **soak, **common)
    settings.register_profile("brief", max_examples=6, **found, **common)  # .ci/run must end in time on slow cores
    settings.register_profile("ci", max_examples=20, **found, **common)
    # The explanation of a failure, which a verdict does not show, takes most of a failed test's time: about 100 calls.
    shrunk: dict[str, Any] = {"phases": [phase for phase in Phase if phase != Phase.explain]}
    # On a GPU compiling kernels for what is drawn takes most of the time. The cases depend on the seed.
    settings.register_profile("gpu", max_examples=8, **shrunk, **common)
    settings.register_profile("default", max_examples=50, **shrunk, **common)
    settings.register_profile("thorough", max_examples=1000, **common)
    if not config.getoption("--hypothesis-profile", default=None):  # otherwise Hypothesis's own plugin loads it
        settings.load_profile("ci" if os.environ.get("CI") else "default")


def seed() -> int | None:
    """The seed of the cases that Hypothesis draws: that of --hypothesis-seed. None without one, and with a profile that
    draws the same cases each time."""
    from hypothesis import core, settings

    return None if settings().derandomize else core.global_force_seed
