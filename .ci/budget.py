"""Lines of Python per room, beside the most that .ci/budget.toml allows. Exit code 1 if a room has more.

python .ci/budget.py           the table, with the difference to the last commit of the branch main, if there is one
python .ci/budget.py --write   sets each budget to the present size; a commit that raises one says why

A room is a folder of the table, without the rooms inside of it. "installed" is what the wheel has of conformance/.
"""

from __future__ import annotations

import subprocess
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
BUDGETS = ROOT / ".ci" / "budget.toml"
INSTALLED, OUTSIDE = "installed", ("conformance/lab", "conformance/methods", "conformance/papers", "conformance/tool")


def room_of(path: str, rooms: list[str]) -> str | None:
    """The innermost room that a file is in."""
    return max((room for room in rooms if path.startswith(f"{room}/")), key=len, default=None)


def sizes(lines: dict[str, int], rooms: list[str]) -> dict[str, int]:
    """The lines of each room. lines: of each file."""
    found = dict.fromkeys(rooms, 0)
    for path, count in lines.items():
        room = room_of(path, rooms)
        if room is not None:
            found[room] += count
    conformance = (room for room in rooms if room.startswith("conformance") and room not in OUTSIDE)
    return found | {INSTALLED: sum(found[room] for room in conformance)}


def git(*arguments: str) -> str | None:
    """The output of git; None if it fails."""
    done = subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=False)
    return done.stdout if done.returncode == 0 else None


def here() -> dict[str, int]:
    listed = git("ls-files", "--cached", "--others", "--exclude-standard", "*.py")
    if not listed:
        raise SystemExit(f"error: {ROOT} is no git checkout")
    return {
        path: len((ROOT / path).read_text(encoding="utf-8").splitlines())
        for path in listed.split() if (ROOT / path).is_file()
    }


def on_main() -> dict[str, int]:
    """The same of the branch main; {} if there is none."""
    found = git("grep", "-c", "", "main", "--", "*.py") or ""
    rows = (line.removeprefix("main:").rpartition(":") for line in found.splitlines())
    return {path: int(count) for path, _, count in rows}


def main(arguments: list[str]) -> int:
    budgets: dict[str, int] = tomllib.loads(BUDGETS.read_text(encoding="utf-8"))
    rooms = [room for room in budgets if room != INSTALLED]
    now, before = sizes(here(), rooms), sizes(on_main(), rooms)
    if arguments == ["--write"]:
        BUDGETS.write_text("".join(f'"{room}" = {now[room]}\n' for room in budgets), encoding="utf-8")
        return 0
    width = max(map(len, budgets))
    print(f"{'room':{width}}   lines  budget  change")
    for room, most in budgets.items():
        over = "  over its budget" if now[room] > most else ""
        change = f"{now[room] - before[room]:+}" if any(before.values()) else "-"
        print(f"{room:{width}}  {now[room]:6}  {most:6}  {change:>6}{over}")
    return int(any(now[room] > most for room, most in budgets.items()))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
