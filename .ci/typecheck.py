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


def main() -> int:
    config = ROOT / "pyproject.toml"
    mapping = tomllib.loads(config.read_text(encoding="utf-8"))["tool"]["setuptools"]["package-dir"]
    with tempfile.TemporaryDirectory() as folder:
        for package, source in mapping.items():
            link = Path(folder, *package.split("."))
            link.parent.mkdir(exist_ok=True)
            if package == "kvtwin":  # a real folder, which also holds the other links
                link.mkdir(exist_ok=True)
                for file in (ROOT / source).glob("*.py"):
                    (link / file.name).symlink_to(file)
            else:
                link.symlink_to(ROOT / source, target_is_directory=True)
        command = [sys.executable, "-m", "mypy", "--config-file", str(config), "--cache-dir", os.devnull]
        # The tests are left out: what they test is looked up by name at run time, so its type is Any.
        command += ["--exclude", r"/test_[^/]*\.py$", *sys.argv[1:], "kvtwin"]
        return subprocess.run(command, cwd=folder, env=os.environ | {"MYPYPATH": folder}, check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
