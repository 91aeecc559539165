"""Walk through pages from top to bottom in an empty environment: run every command and every Python block.

python .ci/walks.py FOLDER [WALK...] [--versions newest|oldest]     all walks, or those that are named

In FOLDER/WALK, which must not exist, it makes a virtual environment, and a copy of the tree beside it. A command may
say "# exits with N". A Python block that begins with a path is that file; any other is run, after those before it on
its page, and prints the block of text that follows it. A diff is applied. Tests compare the verdicts and failures that
the pages show. Without --versions, PIP_CONSTRAINT gives the versions to install; "newest" takes what pip takes.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import venv
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
#: The pages of each walk: a file, and the headings between which it is read.
INSTALL = ("README.md", "## Install", "## Methods")
WALKS = {
    "readme": [("README.md", "", "")],
    "kernel-engineer": [INSTALL, ("docs/tutorial/verify.md", "", "")],
    "library-user": [INSTALL, ("docs/how-to/transformers.md", "", "## Decode fast on a GPU")],
    "author": [INSTALL, ("docs/how-to/change-a-method.md", "", "")],
}
BLOCK = re.compile(r"^```(\w+)\n(.*?)^```$", flags=re.MULTILINE | re.DOTALL)


def steps(text: str) -> Iterator[tuple[str, str, int | str | None]]:
    """("file", path, its text), ("python", code, its output or None), ("diff", text, None) and ("command", line, exit
    code), in order."""
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
        elif language == "diff":
            yield "diff", code, None
        elif language != "text":
            raise SystemExit(f"a block of {language} is neither python, sh, diff nor text")


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


def patch(diff: str, clone: Path) -> None:
    """Apply a diff whose parts begin with "--- PATH", and have lines to remove, then lines to add."""
    for part in re.split(r"^--- ", diff, flags=re.MULTILINE)[1:]:
        name, *lines = part.splitlines()
        old, new = ("".join(f"{line[1:]}\n" for line in lines if line[0] == sign) for sign in "-+")
        text = (clone / name).read_text(encoding="utf-8")
        if text.count(old) != 1:
            raise SystemExit(f"{name} has {text.count(old)} times {old!r}")
        (clone / name).write_text(text.replace(old, new), encoding="utf-8")


#: Runs Python blocks in one namespace, and prints what the last one prints.
RUN = """
import contextlib, io, sys
*before, last = sys.argv[1:]
namespace = {"__name__": "__main__"}
with contextlib.redirect_stdout(io.StringIO()):
    for code in before:
        exec(code, namespace)
exec(last, namespace)
"""


def walk(page: str, text: str, clone: Path, given: dict[str, str]) -> None:
    """Do what a page's text says, in this folder. Raises SystemExit for the first step that does something else."""
    blocks: list[str] = []
    for kind, what, expected in steps(text):
        print(f"{page}, {kind}: {what.splitlines()[0]}", flush=True)
        if kind == "file":
            (clone / what).parent.mkdir(parents=True, exist_ok=True)
            (clone / what).write_text(str(expected), encoding="utf-8")
        elif kind == "diff":
            patch(what, clone)
        elif kind == "python":
            blocks.append(what)
            ran = subprocess.run(
                ["python", "-W", "error::FutureWarning", "-c", RUN, *blocks], cwd=clone, env=given,
                stdout=subprocess.PIPE, text=True, check=False,
            )
            if ran.returncode or expected not in (None, ran.stdout):
                raise SystemExit(f"{page}: exit code {ran.returncode}, printed {ran.stdout!r}, not {expected!r}")
        elif (code := subprocess.run(["bash", "-c", what], cwd=clone, env=given, check=False).returncode) != expected:
            raise SystemExit(f"{page}: {what!r} exits with {code}, expected {expected}")


def part_of(text: str, first: str, last: str) -> str:
    """The text from the heading `first` up to the heading `last`; "" stands for an end of the page."""
    for heading in filter(None, (first, last)):
        if f"\n{heading}\n" not in text:
            raise SystemExit(f"no heading {heading!r}")
    text = text[text.index(f"\n{first}\n"):] if first else text
    return text[:text.index(f"\n{last}\n")] if last else text


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="walks.py", description="Walk through pages in an empty environment.")
    parser.add_argument("folder", type=Path)
    parser.add_argument("walks", nargs="*", metavar="WALK", help=f"of {', '.join(WALKS)}")
    parser.add_argument("--versions", choices=("newest", "oldest"))
    options = parser.parse_args(arguments)
    for name in options.walks or WALKS:
        if name not in WALKS:
            parser.error(f"WALK must be one of {', '.join(WALKS)}, got {name!r}")
    for name in options.walks or WALKS:
        clone, place = ((options.folder / name / part).resolve() for part in ("clone", "venv"))
        copy_of_the_tree(clone)
        venv.create(place, with_pip=True)
        given = environment(place)
        if options.versions is not None:
            given.pop("PIP_CONSTRAINT", None)
        if options.versions == "oldest":
            given["PIP_CONSTRAINT"] = str(ROOT / ".ci" / "oldest.txt")
        for page, first, last in WALKS[name]:
            walk(page, part_of((clone / page).read_text(encoding="utf-8"), first, last), clone, given)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
