"""Walk through README.md from top to bottom in an empty environment: run every command and every Python block.

python .ci/readme.py FOLDER     in FOLDER, which must not exist: a virtual environment, and a copy of the tree beside it

A command may say "# exits with N". A Python block that begins with a path is that file; any other is run, and prints
the block of text that follows it. test_docs_verdict.py compares the verdict that the README shows. PIP_CONSTRAINT gives
the versions to install; without it pip takes the newest ones.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import venv
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
BLOCK = re.compile(r"^```(\w+)\n(.*?)^```$", flags=re.MULTILINE | re.DOTALL)


def steps(text: str) -> Iterator[tuple[str, str, int | str | None]]:
    """("file", path, its text), ("python", code, its output or None) and ("command", line, exit code), in order."""
    found = list(BLOCK.finditer(text))
    for number, match in enumerate(found):
        language, code = match[1], match[2]
        after = found[number + 1] if number + 1 < len(found) else None
        follows = after is not None and after[1] == "text" and not text[match.end():after.start()].strip()
        path = re.match(r"# ([\w/]+\.py)\n", code)
        if language == "python" and path:
            yield "file", path[1], code
        elif language == "python":
            yield "python", code, after[2] if after is not None and follows else None
        elif language == "sh":
            for line in code.splitlines():
                exits = re.search(r"# exits with (\d+)$", line)
                yield "command", line, int(exits[1]) if exits else 0
        elif language != "text":
            raise SystemExit(f"README.md: a block of {language} is neither python, sh nor text")


def copy_of_the_tree(folder: Path) -> None:
    """The files that a clone has."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
    for name in listed.stdout.decode().strip("\0").split("\0"):
        if (ROOT / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, folder / name)


def environment(place: Path) -> dict[str, str]:
    """That of a shell in which the virtual environment is active."""
    left = ("PYTHON", "TOX_", "VIRTUAL_ENV")
    kept = {name: value for name, value in os.environ.items() if not name.startswith(left)}
    return {**kept, "VIRTUAL_ENV": str(place), "PATH": f"{place / 'bin'}{os.pathsep}{os.environ['PATH']}"}


def walk(text: str, clone: Path, given: dict[str, str]) -> None:
    """Do what the text says, in this folder. Raises SystemExit for the first step that does something else."""
    for kind, what, expected in steps(text):
        print(f"README.md, {kind}: {what.splitlines()[0]}", flush=True)
        if kind == "file":
            (clone / what).parent.mkdir(parents=True, exist_ok=True)
            (clone / what).write_text(str(expected), encoding="utf-8")
        elif kind == "python":
            ran = subprocess.run(
                ["python", "-W", "error::FutureWarning", "-c", what], cwd=clone, env=given, stdout=subprocess.PIPE,
                text=True, check=False,
            )
            if ran.returncode or expected not in (None, ran.stdout):
                raise SystemExit(f"README.md: exit code {ran.returncode}, printed {ran.stdout!r}, not {expected!r}")
        elif (code := subprocess.run(["bash", "-c", what], cwd=clone, env=given, check=False).returncode) != expected:
            raise SystemExit(f"README.md: {what!r} exits with {code}, expected {expected}")


def main(arguments: list[str]) -> int:
    (folder,) = map(Path, arguments)
    clone, place = (folder / "clone").resolve(), (folder / "venv").resolve()
    copy_of_the_tree(clone)
    venv.create(place, with_pip=True)
    walk((clone / "README.md").read_text(encoding="utf-8"), clone, environment(place))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
