"""Run mypy on the packages as they are installed: a temporary folder kvtwin/ with links to the folders of the tree.

mypy does not see a mapped tree: to it, the folder reference/ is a package "reference". Arguments are handed to mypy.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


CONFIG = ROOT / "pyproject.toml"


def link(folder: str) -> None:
    """Lay out kvtwin/ in a folder as it is installed."""
    mapping = tomllib.loads(CONFIG.read_text(encoding="utf-8"))["tool"]["setuptools"]["package-dir"]
    for package, source in mapping.items():
        place = Path(folder, *package.split("."))
        place.parent.mkdir(exist_ok=True)
        if package == "kvtwin":  # a real folder, which also holds the other links
            place.mkdir(exist_ok=True)
            for file in (ROOT / source).glob("*.py"):
                (place / file.name).symlink_to(file)
        else:
            place.symlink_to(ROOT / source, target_is_directory=True)


def mypy(folder: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run mypy in a folder that has kvtwin/. Prints what it says about kvtwin, and returns what it says of files."""
    command = [sys.executable, "-m", "mypy", "--config-file", str(CONFIG), "--cache-dir", os.devnull, *arguments]
    return subprocess.run(command, cwd=folder, env=os.environ | {"MYPYPATH": folder}, check=False, text=True,
                          stdout=None if arguments[-1] == "kvtwin" else subprocess.PIPE)


def main() -> int:
    with tempfile.TemporaryDirectory() as folder:
        link(folder)
        # The tests are left out: what they test is looked up by name at run time, so its type is Any.
        return mypy(folder, "--exclude", r"/test_[^/]*\.py$", *sys.argv[1:], "kvtwin").returncode


if __name__ == "__main__":
    sys.exit(main())
