"""Packages that ``kvtwin new`` writes, which Python finds as if they were installed, and what verify says of them."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

from kvtwin.conformance import cli, own_methods


def write(folder: Path, name: str, *options: str) -> Path:
    """Write the package into folder/name. Returns the folder of its modules."""
    assert cli.main(["new", name, str(folder / name), *options]) == 0
    info = folder / name / f"{name}-0.1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 0.1\n", encoding="utf-8")
    (info / "entry_points.txt").write_text(f"[{own_methods.GROUP}]\n{name} = {name}:METHOD\n", encoding="utf-8")
    return folder / name / name


def replace(path: Path, old: str, new: str) -> None:
    """Change a text that a file has once."""
    text = path.read_text(encoding="utf-8")
    assert text.count(old) == 1, f"{path.name} has {text.count(old)} times {old!r}"
    path.write_text(text.replace(old, new), encoding="utf-8")


def patch(folder: Path, diff: str) -> None:
    """Apply a diff whose parts begin with "--- PATH", and have lines to remove, then lines to add."""
    for part in re.split(r"^--- ", diff, flags=re.MULTILINE)[1:]:
        name, *lines = part.splitlines()
        old, new = ("".join(f"{line[1:]}\n" for line in lines if line[0] == sign) for sign in "-+")
        replace(folder / name, old, new)


def verify(folder: Path, name: str, *arguments: str) -> tuple[int, str, dict[str, Any]]:
    """The exit code, what is printed, and the report of ``kvtwin verify``, with the package in folder/name."""
    path = os.pathsep.join(filter(None, [str(folder / name), os.environ.get("PYTHONPATH")]))
    (folder / "report.json").unlink(missing_ok=True)
    done = subprocess.run(
        [sys.executable, "-m", "kvtwin", "verify", *arguments, "--device=cpu", "--jobs=1", "--report=report.json"],
        cwd=folder, capture_output=True, text=True, timeout=300, check=False,
        env={**os.environ, "PYTEST_ADDOPTS": "", "PYTHONPATH": path},
    )  # fmt: skip
    assert (folder / "report.json").is_file(), done.stdout + done.stderr
    return done.returncode, done.stdout, json.loads((folder / "report.json").read_text(encoding="utf-8"))
