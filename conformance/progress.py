"""Progress bars of long commands. They are on stderr, and only if it is a terminal."""

from __future__ import annotations

import sys
from typing import TextIO

from tqdm import tqdm


def bar(total: int, unit: str) -> tqdm[None]:
    """A bar for `total` things, which disappears at the end: `with bar(3, "file") as progress: ... progress.update()`.

    Without a terminal, or for a single thing, nothing is shown.
    """
    hidden = None if total > 1 else True  # None: unless stderr is a terminal
    return tqdm(total=total, unit=unit, disable=hidden, file=sys.stderr, leave=False, dynamic_ncols=True)


def say(line: str, file: TextIO | None = None) -> None:
    """Print a line, to stdout by default, above a bar that is shown."""
    file = sys.stdout if file is None else file
    tqdm.write(line, file=file)
    file.flush()
