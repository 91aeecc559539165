"""Compare the public names with those of the last release: CHANGELOG.md must name each that came or went since.

python .ci/public_names.py           exit code 1 if the section "Unreleased" lacks such a name
python .ci/public_names.py --write   stores the present names in public_names.txt: part of a release

docs/explanation/versions.md says which names are public. They are read from the sources, without importing them.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
STORED, CHANGELOG = ROOT / ".ci" / "public_names.txt", ROOT / "CHANGELOG.md"
SIDES = ("reference", "optimized")
#: Where the options of each command are declared.
OPTIONS = {
    "pytest": "harness/options.py", "kvtwin verify": "__main__.py", "kvtwin replay": "harness/replay.py",
    "kvtwin new": "new_method.py", "kvtwin capacity": "capacity.py", "kvtwin accuracy": "cli.py",
}
HEAD = "# The public names of the last release: "
NO_RELEASE = "none"


def exports(tree: ast.Module) -> list[str]:
    """The names in a module's `__all__`, which is a list of texts; none if it has none."""
    assigned = (node for node in tree.body if isinstance(node, ast.Assign))
    found = [node.value for node in assigned if any(ast.unparse(target) == "__all__" for target in node.targets)]
    return list(ast.literal_eval(found[0])) if found else []


def parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def of_methods() -> Iterator[str]:
    """What the methods' modules export, and their caches."""
    for side in SIDES:
        for pattern in ("[!_]*.py", "*/__init__.py", "baselines/[!_]*.py"):
            for path in (ROOT / side).glob(pattern):
                parts = [part for part in path.relative_to(ROOT).with_suffix("").parts if part != "__init__"]
                names = exports(parsed(path))
                yield from (".".join(("kvtwin", *parts, name)) for name in names)
                caches = (f"{name.removesuffix('Config')}Cache" for name in names if name.endswith("Config"))
                yield from (f"kvtwin.{side}.hf.{name}" for name in caches)


def of_the_suite() -> Iterator[str]:
    """What the suite exports, the commands and the options."""
    suite = ROOT / "conformance"
    for module, path in (("", "__init__.py"), (".api", "api.py")):
        yield from (f"kvtwin.conformance{module}.{name}" for name in exports(parsed(suite / path)))
    for node in parsed(suite / "cli.py").body:
        if isinstance(node, ast.FunctionDef) and [one.arg for one in node.args.args] == ["arguments", "prog"]:
            yield f"kvtwin {node.name}"
    for command, path in OPTIONS.items():
        for node in ast.walk(parsed(suite / path)):
            if isinstance(node, ast.Call) and ast.unparse(node.func).endswith((".add_argument", ".addoption")):
                texts = (one.value for one in node.args if isinstance(one, ast.Constant))
                # The command line's own --version stands beside the options of "accuracy".
                command_of = command.split()[0] if "--version" in ast.unparse(node) else command
                yield from (f"{command_of} {text}" for text in texts if str(text).startswith("--"))


def now() -> set[str]:
    return {*of_methods(), *of_the_suite()}


def sections(text: str) -> dict[str, str]:
    """The changelog's sections by title, "Unreleased" or a version, in order."""
    parts = re.split(r"^## \[([^\]]+)\].*\n", text, flags=re.MULTILINE)
    return dict(zip(parts[1::2], parts[2::2], strict=True))


def faults(names: set[str], stored: str, changelog: str) -> list[str]:
    """What is missing in the changelog, a line each. stored: the text of public_names.txt."""
    found = sections(changelog)
    if next(iter(found), None) != "Unreleased":
        return ["CHANGELOG.md: the first section must be ## [Unreleased]"]
    released = next((title for title in found if title != "Unreleased"), NO_RELEASE)
    head, *before = stored.splitlines()
    if head != HEAD + released:
        return [f"{STORED.name}: expected the names of {released}; after a release: python .ci/public_names.py --write"]
    return [
        f"CHANGELOG.md, Unreleased: {name} {'is new' if name in names else 'is gone'}, and the section does not name it"
        for name in sorted(names ^ set(before))
        if not re.search(rf"(?<![\w-]){re.escape(re.split(r'[ .]', name)[-1])}(?![\w-])", found["Unreleased"])
    ]


def main(arguments: list[str]) -> int:
    changelog = CHANGELOG.read_text(encoding="utf-8")
    if arguments == ["--write"]:
        released = next((title for title in sections(changelog) if title != "Unreleased"), NO_RELEASE)
        STORED.write_text("\n".join((HEAD + released, *sorted(now()))) + "\n", encoding="utf-8")
        return 0
    found = faults(now(), STORED.read_text(encoding="utf-8"), changelog)
    print("\n".join(found or ["the changelog names each public name that changed"]))
    return int(bool(found))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
