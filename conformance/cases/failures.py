"""Saving the case of a failing test as a safetensors file, for ``kvtwin replay FILE``.

Files go to the folder that KVTWIN_FAILURES names (default: `kvtwin-failures` in the current folder), one per test:
while Hypothesis shrinks, each failing example overwrites the last one, so the smallest remains.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

from . import case as cases

FOLDER = "KVTWIN_FAILURES"


def save_latest() -> str | None:
    """Save the case that the running test used last; returns the command that replays it, None if there is no case.

    Outside of a test nothing is saved: the caller of a script has the case itself.
    """
    case, test = cases.latest(), cases.running_test()
    if case is None or test is None:
        return None
    name = re.sub(r"[^\w.=-]+", "_", test.rsplit("/", 1)[-1])
    folder = Path(os.environ.get(FOLDER, "kvtwin-failures"))
    try:
        folder.mkdir(parents=True, exist_ok=True)
        return case.save(folder / f"{name[:150]}.safetensors")
    except OSError as error:  # a read-only folder must not hide the failure itself
        return f"(not saved: {error})"
