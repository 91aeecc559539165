"""Write the generated part of the reference: pages that follow from code, ledgers and stored results.

    python docs/generate.py            writes docs/reference/{methods,results,commands}, as each build of the docs does

Nothing in these folders is edited by hand. Prose about a method is in docs/notes/NAME.md and is included at the top of
its page: a method without that file gets a page all the same.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import inspect
import io
import json
import os
import re
import shutil
import sys
import textwrap
import tomllib
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent
FOLDERS = ("methods", "results", "commands")
PLOTS = ("accuracy", "needle", "headline", "bands")
#: Modules with a command line, in the order of their sections; the key names the page.
COMMANDS = {
    "verify": ("kvtwin.conformance",),
    "results": (
        "kvtwin.conformance.ledger", "kvtwin.conformance.capacity", "kvtwin.fixtures.accuracy",
        "kvtwin.fixtures.needle", "kvtwin.fixtures.counterfactual", "kvtwin.fixtures.record",
    ),
    "develop": (
        "kvtwin.conformance.mutation", "kvtwin.conformance.hosts", "kvtwin.conformance.soak",
        "kvtwin.conformance.compile_only",
    ),
}  # fmt: skip
#: Where `main` is, of the packages among them.
MAINS = {
    "kvtwin.conformance": "kvtwin.conformance.__main__",
    "kvtwin.conformance.mutation": "kvtwin.conformance.mutation.mutate",
}
TITLES = {"verify": "The command kvtwin", "results": "Claims, capacity, accuracy, traces", "develop": "Develop kvtwin"}

Pages = dict[str, str]


def pages() -> Pages:
    """Every generated page: its path below docs/reference, and its Markdown."""
    from kvtwin.conformance import discovery

    found = {f"methods/{pair.name}.md": method_page(pair) for pair in discovery.methods()}
    found["methods/index.md"] = index(
        "Methods", "One page per method: use, readings, API, claims, accuracy, speed and mutants.",
        [pair.name for pair in discovery.methods()],
    )
    found |= {f"results/{name}.md": text for name, text in result_pages().items()}
    found["results/index.md"] = index("Results", "Stored results, as they are in the repository.", list(result_pages()))
    found |= {f"commands/{name}.md": text for name, text in command_pages().items()}
    found["commands/index.md"] = index(
        "Commands and options", "Command lines and pytest options, from the programs themselves.", list(command_pages())
    )
    return found


def write(folder: Path) -> None:
    """Write all pages and plots below `folder`, and delete what is left of an earlier build."""
    made = {folder / path: text.encode() for path, text in pages().items()}
    made |= {folder / "results" / f"{name}.svg": read(f"fixtures/{name}.svg").encode() for name in PLOTS}
    for name in FOLDERS:
        for path in (folder / name).rglob("*"):
            if path.is_file() and path not in made:
                path.unlink()
    for path, content in made.items():
        if not path.is_file() or path.read_bytes() != content:  # an unchanged page is not built again
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content)


def read(path: str) -> str:
    return (ROOT / path).read_text(encoding="utf-8")


def index(title: str, about: str, names: Iterable[str]) -> str:
    lines = "\n".join(names)
    return f"# {title}\n\n{about}\n\n```{{toctree}}\n:maxdepth: 1\n\n{lines}\n```\n"


# Methods -------------------------------------------------------------------------------------------------------------


def method_page(pair: Any) -> str:
    """One method: its notes, API, claims, accuracy, speed and mutants."""
    notes = HERE / "notes" / f"{pair.name}.md"
    parts = [notes.read_text(encoding="utf-8") if notes.is_file() else default_notes(pair)]
    parts += [
        f"## API\n\n`kvtwin.reference.{pair.path}` and `kvtwin.optimized.{pair.path}` export the same names, with the "
        "same signatures and result types.\n",
        *(entry(getattr(pair.reference, name), name) for name in pair.exports),
        *cache_entry(pair.name),
        "## Claims\n", claims(pair.name),
        "## Accuracy\n", accuracy(pair.name),
        "## Speed\n", speed(pair.name),
        "## Mutants\n", mutants_summary(pair.name),
    ]  # fmt: skip
    return "\n".join(part.rstrip() + "\n" for part in parts)


def default_notes(pair: Any) -> str:
    return f"# {pair.name}\n\n{prose(inspect.getdoc(pair.reference) or '')}\n"


def entry(value: Any, name: str, level: str = "###") -> str:
    """A class or function: its heading, signature and docstring; of a state or cache also its methods."""
    if not callable(value):
        return f"{level} `{name}`\n"
    text = [f"{level} `{name}`\n", f"```python\n{signature(value, name)}\n```\n", prose(own_doc(value))]
    if inspect.isclass(value) and name.endswith(("State", "Cache", "Scorer")):
        text += [f"- `{flat_signature(one, key)}`: {first_sentence(one)}" for key, one in methods_of(value).items()]
    return "\n".join(text) + "\n"


def methods_of(value: type) -> dict[str, Any]:
    """Public methods of a class of ours and of its bases of ours, its own first."""
    found: dict[str, Any] = {}
    for base in value.__mro__:
        if base.__module__.startswith("kvtwin."):
            for key, one in vars(base).items():
                if not key.startswith("_") and inspect.isfunction(one):
                    found.setdefault(key, one)
    return found


def own_doc(value: Any) -> str:
    """The docstring that this object has itself: dataclasses and NamedTuples without one get a generated one."""
    doc = value.__doc__ if inspect.isclass(value) else inspect.getdoc(value)
    return "" if not doc or doc.startswith(f"{value.__name__}(") else inspect.cleandoc(doc)


def _bare(value: Any) -> inspect.Signature:
    found = inspect.signature(value)
    return found.replace(
        parameters=[
            one.replace(annotation=inspect.Parameter.empty) for one in found.parameters.values() if one.name != "self"
        ],
        return_annotation=inspect.Signature.empty,
    )


def flat_signature(value: Any, name: str) -> str:
    return f"{name}{_bare(value)}"


def signature(value: Any, name: str) -> str:
    """Without annotations, which the docstring explains; long ones wrapped."""
    try:
        text = flat_signature(value, name)
    except (TypeError, ValueError):
        return name
    text = re.sub(r"<factory>", "...", text)
    return "\n".join(textwrap.wrap(text, 84, subsequent_indent=" " * 4, break_long_words=False))


def first_sentence(value: Any) -> str:
    doc = " ".join((inspect.getdoc(value) or "no description").split("\n\n")[0].split())
    return escape(re.split(r"(?<=[.;:]) ", doc)[0].rstrip(";:."))


ESCAPED = re.compile(r"([\\*_\[\]<>|#~$^{}])")
ITEM = re.compile(r"^[a-z_][\w, ]{0,60}?(?: \[[^\]]*\](?: \w+)?)?: (?=\S)")

#: Starts a paragraph after a list of items.
AFTER = ("Raises ", "Returns ", "TypeError", "ValueError")


def escape(text: str) -> str:
    """Markdown that shows `text` as it is, but for code in backticks."""
    parts = re.split(r"(``.+?``|`[^`]+`)", text)
    return "".join(part if number % 2 else ESCAPED.sub(r"\\\1", part) for number, part in enumerate(parts))


def prose(doc: str) -> str:
    """A docstring as Markdown: paragraphs; "name: meaning" at the start of a line becomes an item; indented is code."""
    out: list[str] = []
    for block in re.split(r"\n\s*\n", doc):
        lines = block.splitlines()
        if lines and all(line.startswith("    ") for line in lines):
            out += ["```text", *(line[4:] for line in lines), "```", ""]
            continue
        text: list[str] = []
        for line in lines:
            begins = not text or text[-1].endswith((".", ":"))  # of a sentence: an item does not start within one
            if text and not (begins and (ITEM.match(line) or line.startswith(AFTER))):
                text[-1] += f" {line.strip()}"
            else:
                text.append(line.strip())
        inside = False
        for one in text:
            item = bool(ITEM.match(one))
            if inside and not item:
                out.append("")
            parts = re.split(f"(?<=\\.) (?={ITEM.pattern.removeprefix('^')})", one) if item else [one]
            out += [f"- {escape(part)}" if item else escape(part) for part in parts if part]
            out += [] if item else [""]
            inside = item
        out.append("")
    return re.sub(r"\n{3,}", "\n\n", "\n".join(out))


def cache_entry(name: str) -> Iterator[str]:
    """The cache for transformers, where it is installed."""
    from kvtwin.conformance.judge import checkers

    state = checkers.pair(name).state
    assert state is not None
    caches: ModuleType = importlib.import_module("kvtwin.reference.hf")
    cache = getattr(caches, f"{state.__name__.removesuffix('State')}Cache")
    yield (
        f"### `{cache.__name__}`\n\nIn `kvtwin.reference.hf` and `kvtwin.optimized.hf`; see "
        f"[Use a method with transformers](../../how-to/transformers.md).\n\n{prose(own_doc(cache))}"
    )


def claims(name: str) -> str:
    """The ledger's claims of this method, each with its verdict."""
    from kvtwin.conformance import ledger

    own = [claim for claim in ledger.load() if claim.method == name]
    if not own:
        return "No ledger: this method is a baseline, and the claims of its paper are not examined.\n"
    return f"{ledger.table(own)}\n\n[The claims ledger](../../explanation/ledger.md) explains the verdicts.\n"


def stored(name: str) -> Any:
    return json.loads(read(f"fixtures/{name}.json"))


def accuracy(name: str) -> str:
    from kvtwin.fixtures import accuracy_plot

    result = stored("accuracy")
    rows = [row for row in result["rows"] if row["method"] in (name, result["rows"][0]["method"])]
    if not any(row["method"] == name for row in rows):
        return "Not measured.\n"
    return (
        f"{accuracy_plot.markdown({**result, 'rows': rows})}\n\nOn the small model of this repository, by share of the "
        "context that the cache holds; see [Accuracy](../results/accuracy.md).\n"
    )


def _baselines() -> Iterator[tuple[str, Any]]:
    for path in sorted((ROOT / "perf" / "baselines").glob("*.json")):
        yield path.stem, json.loads(path.read_text(encoding="utf-8"))


def speed(name: str) -> str:
    """The stored benchmarks of this method, for each machine."""
    parts = []
    for _, run in _baselines():
        own = [one for one in run["benchmarks"] if one["group"] == name]
        if own:
            parts.append(f"{_machine(run)}.\n\n{benchmark_table(own)}\n")
    if not parts:
        return "No stored benchmark.\n"
    return "\n".join(parts) + "\n[Benchmarks](../results/benchmarks.md) explains the columns.\n"


def _machine(run: Any) -> str:
    info = run["machine_info"]
    return (
        f"{info['gpu']}, copy {run['roofline']['copy'] / 1e12:.2f} TB/s, CUDA {info['cuda']}, torch {info['torch']}, "
        f"triton {info['triton']}"
    )


def benchmark_table(benchmarks: Iterable[Any]) -> str:
    """Time, share of the copy bandwidth, and ratio to the fastest peer of the same run."""
    lines = ["| benchmark | ms | of copy bandwidth | time over the fastest peer's |", "|---|---|---|---|"]
    for one in benchmarks:
        info = one["extra_info"]
        if "milliseconds" not in info:
            continue
        peer = info["strongest"]
        ratio = "no peer" if peer is None else f"{info['peers'][peer]['ratio']:.3g} ({peer})"
        title = one["name"].removeprefix("test_")
        lines.append(f"| `{title}` | {info['milliseconds']:.4g} | {info['share_of_copy']:.0%} | {escape(ratio)} |")
    return "\n".join(lines)


def _mutants() -> dict[str, Any]:
    found = [json.loads(path.read_text(encoding="utf-8")) for path in sorted(ROOT.glob("conformance/**/mutants.json"))]
    return {one["method"]: one for one in found}


def mutants_summary(name: str) -> str:
    found = _mutants().get(name)
    if found is None:
        return "No stored kill matrix.\n"
    killed = sum(one["status"] == "killed" for one in found["mutants"])
    count = len(found["mutants"])
    return f"{killed} of {count} mutants are killed; see [the kill matrix](../results/kill-matrix.md).\n"


# Results -------------------------------------------------------------------------------------------------------------


def result_pages() -> Pages:
    return {
        "claims": claims_page(), "accuracy": accuracy_page(), "needle": needle_page(), "bands": bands_page(),
        "headline": headline_page(), "benchmarks": benchmarks_page(), "kill-matrix": kill_matrix_page(),
    }  # fmt: skip


def claims_page() -> str:
    from kvtwin.conformance import ledger

    return (
        "# Claims of the papers\n\nGenerated from `conformance/*/claims.toml`. Each claim has tests that assert its "
        "verdict; see [the claims ledger](../../explanation/ledger.md).\n\n" + ledger.table(ledger.load()) + "\n"
    )


def accuracy_page() -> str:
    from kvtwin.fixtures import accuracy_plot

    result = stored("accuracy")
    return (
        "# Accuracy over budget\n\n![Accuracy over budget, a panel per task and a line per method](accuracy.svg)\n\n"
        f"{accuracy_plot.markdown(result)}\n\n{escape(accuracy_plot.caption(result))}\n\n"
        "One small model and one way to ask: these are results of these settings, not a ranking of the methods.\n"
    )


def needle_page() -> str:
    from kvtwin.fixtures import needle_plot

    result = stored("needle")
    return (
        "# One pair at a given depth\n\n![Pairs found, by length and depth](needle.svg)\n\n"
        f"{markdown_table(needle_plot.columns(result), needle_plot.cells(result))}\n\n"
        f"{escape(needle_plot.caption(result))}\n"
    )


def bands_page() -> str:
    result = stored("bands")
    rows = [
        [str(one["layer"]), f"{one['pooled']:+.3f}", f"{one['mean']:+.3f}", f"{one['standard_error']:.3f}"]
        for one in result["layers"]
    ]
    return (
        "# EpiKV's bands in the fixture model\n\nThe protocol is that of EpiKV's appendix C: windows of the context "
        "are replaced by padding, one at a time; a token is important if this changes the answer. The table has "
        "Spearman's rank correlation of these labels with the change of the hidden state.\n\n"
        "![Correlation by layer](bands.svg)\n\n"
        f"{markdown_table(['layer', 'all tokens', 'mean over documents', 'standard error'], rows)}\n\n"
        f"{result['traces']} documents, {result['tokens']:,} tokens, {result['important']:.1%} of them important.\n"
    )


def headline_page() -> str:
    result = stored("headline")
    return (
        "# The papers' headline experiments\n\n![The papers' headline experiments](headline.svg)\n\n"
        f"{escape(result['caption'])}\n\n{markdown_table(result['columns'], result['rows'])}\n\n"
        "`python -m tox -e headline` measures these; [Run on a GPU](../../how-to/gpu.md) says how.\n"
    )


def benchmarks_page() -> str:
    parts = [
        "# Benchmarks\n\nMedians of device time with a cold L2 cache. The share is that of the copy bandwidth that the "
        "same run measured: a kernel that reads more than it writes can exceed 100 %. The last column is our time over "
        "that of the fastest peer on the same inputs, in the same run; less than 1 means that ours is faster.\n"
    ]
    for machine, run in _baselines():
        parts += [f"## {machine}\n\n{_machine(run)}.\n\n### Against the bars\n", bars_table(machine, run)]
        for group in sorted({one["group"] for one in run["benchmarks"]}):
            own = [one for one in run["benchmarks"] if one["group"] == group]
            parts.append(f"### {group}\n\n{benchmark_table(own)}\n")
    return "\n".join(parts)


def bars_table(machine: str, run: Any) -> str:
    """What perf/thresholds asks for, beside what was measured."""
    measured = {
        (Path(one["fullname"].split("::")[0]).stem.removeprefix("bench_"), one["name"].removeprefix("test_")):
        one["extra_info"] for one in run["benchmarks"]
    }  # fmt: skip
    rows = []
    for path in sorted((ROOT / "perf" / "thresholds").glob("*.toml")):
        for key, bar in tomllib.loads(path.read_text(encoding="utf-8")).items():
            info = measured.get((path.stem, key))
            for what, asked in _flat(bar.get("bar", {})):
                found = None if info is None else _measured(info, what, machine)
                if found is not None:
                    rows.append([f"`{path.stem}` `{key}`", escape(what), f"{found:.3g}", f"{asked:g}"])
    return markdown_table(["benchmark", "quantity", "measured", "bar"], rows) + "\n"


def _flat(table: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, float]]:
    for key, value in table.items():
        if isinstance(value, dict):
            yield from _flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def _measured(info: Any, what: str, machine: str) -> float | None:
    kind, _, name = what.partition(".")
    if kind == "ratio":
        name = info["strongest"] if name == "strongest" else name
        others = {**info["peers"], **info["references"]}
        return others[name]["ratio"] if name in others else None
    if kind == "milliseconds":
        return info["milliseconds"] if name == machine else None
    return info.get({"share": "share_of_copy"}.get(what, what))


def kill_matrix_page() -> str:
    found = _mutants()
    rows = [
        [name, str(len(one["mutants"])), str(sum(mutant["status"] == "killed" for mutant in one["mutants"]))]
        for name, one in found.items()
    ]
    parts = [
        "# Kill matrix\n\nA mutant is one deliberate mistake in one file. `python -m tox -e mutants` applies each "
        "of them to a copy and runs the tests that must fail.\n\n"
        + markdown_table(["method", "mutants", "killed"], rows)
    ]
    for name, one in found.items():
        rows = [
            [f"`{mutant['name']}`", escape(mutant["what"]), mutant["status"],
             ", ".join(f"`{test.split('::')[-1]}`" for test in mutant.get("killed_by", []))]
            for mutant in one["mutants"]
        ]  # fmt: skip
        parts.append(f"## {name}\n\n{markdown_table(['mutant', 'mistake', 'status', 'killed by'], rows)}")
    return "\n\n".join(parts) + "\n"


def markdown_table(columns: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    head = list(columns)
    lines = [f"| {' | '.join(head)} |", "|---" * len(head) + "|"]
    for row in rows:
        cells = [re.sub(r"(?<!\\)\|", r"\|", cell) for cell in row]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


# Commands ------------------------------------------------------------------------------------------------------------


def command_pages() -> Pages:
    """One page per group of commands, and one of pytest's options."""
    found = {
        name: f"# {TITLES[name]}\n\n" + "\n".join(f"## `python -m {one}`\n\n{help_of(one)}" for one in modules)
        for name, modules in COMMANDS.items()
    }
    from kvtwin.conformance import cli

    helps = [("kvtwin", ["--help"]), *((f"kvtwin {name}", [name, "--help"]) for name in cli.COMMANDS)]
    own = "".join(
        f"## `{program}`\n\n```text\n{_printed(cli.main, arguments, program)}```\n\n" for program, arguments in helps
    )
    found["verify"] = found["verify"].replace("\n\n", f"\n\n{own}", 1)
    found["pytest"] = pytest_page()
    return found


def help_of(module: str) -> str:
    main = importlib.import_module(MAINS.get(module, module)).main
    return f"```text\n{_printed(main, ['--help'], f'python -m {module}')}```\n"


def _printed(main: Callable[[list[str]], Any], arguments: list[str], program: str) -> str:
    """What a command line prints at --help, 88 columns wide."""
    before, columns = sys.argv, os.environ.get("COLUMNS")
    sys.argv, os.environ["COLUMNS"] = [program], "88"
    try:
        with contextlib.redirect_stdout(io.StringIO()) as printed, contextlib.suppress(SystemExit):
            main(arguments)
    finally:
        sys.argv = before
        os.environ.pop("COLUMNS") if columns is None else os.environ.update(COLUMNS=columns)
    return printed.getvalue().rstrip() + "\n"


class _Options:
    """Stands in for pytest's parser: records the options that the plugin adds."""

    def __init__(self) -> None:
        self.rows: list[list[str]] = []

    def getgroup(self, *_: str) -> _Options:
        return self

    def addoption(self, name: str, **options: Any) -> None:
        if options.get("help") == argparse.SUPPRESS:
            return
        values = "{" + ",".join(options["choices"]) + "}" if "choices" in options else options.get("metavar", "")
        self.rows.append([f"`{name}={values}`" if values else f"`{name}`", escape(options["help"])])


def pytest_page() -> str:
    from kvtwin.conformance.harness import options

    seen = _Options()
    options.add(seen)  # type: ignore[arg-type]
    about = read("docs/notes/pytest-options.md")
    return f"# pytest options\n\n{about}\n{markdown_table(['option', 'meaning'], seen.rows)}\n"


def main() -> int:
    sys.path.insert(0, str(ROOT))
    write(HERE / "reference")
    return 0


def clean() -> None:
    """Delete what `write` made."""
    for name in FOLDERS:
        shutil.rmtree(HERE / "reference" / name, ignore_errors=True)


if __name__ == "__main__":
    sys.exit(main())
