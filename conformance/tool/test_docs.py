"""README and docs: examples run and print what they show, links have targets, and every method has a page."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from kvtwin.conformance import cli, discovery
from kvtwin.conformance.cases.case import DecodeCase
from kvtwin.conformance.judge.checkers import longflow as judge
from kvtwin.conformance.judge.compare import Mismatch
from kvtwin.conformance.lab.docs_source import DOCS, ROOT, docs_module

if not (DOCS / "generate" / "__init__.py").is_file():
    pytest.skip("docs/ is not in the wheel", allow_module_level=True)

generate = docs_module("generate", "its pages are tested here")

FENCE = re.compile(r"^```(\w+)\n(.*?)^```$", flags=re.MULTILINE | re.DOTALL)
PROLOGUE = """
import contextlib, io, pathlib

def shows(code, expected, name, path, namespace):
    if path is not None:
        pathlib.Path(path).parent.mkdir(parents=True, exist_ok=True)
        pathlib.Path(path).write_text(code)
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        exec(compile(code, name, "exec"), namespace)
    if expected is not None:
        assert printed.getvalue() == expected, f"{name} prints {printed.getvalue()!r}, and shows {expected!r}"
"""


def written() -> list[Path]:
    """The pages that are not generated."""
    pages = [path for path in sorted(DOCS.rglob("*.md")) if path.relative_to(DOCS).parts[0] != "_build"]
    return [path for path in pages if not set(path.relative_to(DOCS).parts) & set(generate.FOLDERS)]


def examples(text: str) -> list[tuple[str, str | None]]:
    """The Python blocks, each with its output: the `text` block that follows immediately."""
    found = list(FENCE.finditer(text))
    pairs = []
    for number, match in enumerate(found):
        after = found[number + 1] if number + 1 < len(found) else None
        shown = after is not None and after[1] == "text" and not text[match.end() : after.start()].strip()
        if match[1] == "python":
            pairs.append((match[2], after[2] if shown and after is not None else None))
    return pairs


def run(pages: list[Path], folder: Path) -> int:
    """Run the examples of pages, each page in its own namespace. A block that starts with a path is that file."""
    script, count = [PROLOGUE], 0
    for page in pages:
        script.append("namespace = {'__name__': 'example'}")
        for number, (code, expected) in enumerate(examples(page.read_text(encoding="utf-8"))):
            path = re.match(r"# ([\w/]+\.py)\n", code)
            name = f"{page.name}, block {number + 1}"
            script.append(f"shows({code!r}, {expected!r}, {name!r}, {path and path[1]!r}, namespace)")
            count += 1
    command = [sys.executable, "-W", "error::FutureWarning", "-c", "\n".join(script)]
    ran = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=300, check=False)
    assert ran.returncode == 0, ran.stderr
    return count


@pytest.mark.slow
@pytest.mark.parametrize("folder", [".", "tutorial", "how-to", "explanation", "contributing", "notes"])
def test_examples_run_and_print_what_they_show(folder, tmp_path):
    pages = [page for page in written() if page.parent == DOCS / folder]
    if any("transformers import" in page.read_text(encoding="utf-8") for page in pages):
        pytest.importorskip("transformers", reason="needs transformers: python -m pip install 'kvtwin[hf]'")
    count = run(pages, tmp_path)
    assert count or folder in ("explanation", "contributing")


@pytest.mark.slow
def test_generated_examples_run(tmp_path):
    pytest.importorskip("transformers", reason="needs transformers: python -m pip install 'kvtwin[hf]'")
    pages = []
    for pair in discovery.built_in():
        notes = DOCS / "notes" / f"{pair.name}.md"
        if not notes.is_file() or "\n## Use\n" not in notes.read_text(encoding="utf-8"):
            pages.append(tmp_path / f"{pair.name}.md")
            pages[-1].write_text(generate.methods.use(pair), encoding="utf-8")
    derived = {pair.name for pair in discovery.built_in() if pair.is_baseline and pair.takes_blocks}
    assert derived == {page.stem for page in pages}
    assert run(pages, tmp_path) == 2 * len(pages)


def test_a_baseline_without_notes_has_a_page(tmp_path, monkeypatch):
    """With the docstring of its reference."""
    monkeypatch.setattr(generate.methods, "DOCS", tmp_path)
    pair = next(pair for pair in discovery.built_in() if pair.is_baseline and pair.has_paper)
    page = generate.methods.method_page(pair)
    first, rest = pair.reference.__doc__.split("\n\n", 1)
    assert page.startswith(f"# {pair.name}\n\n{generate.markdown.escape(first)}\n")
    assert f"\n{generate.markdown.escape(rest.splitlines()[0])}" in page
    assert "\n## Use\n" in page and "\n## API\n" in page


def test_an_example_that_prints_something_else_is_noticed(tmp_path):
    page = tmp_path / "page.md"
    page.write_text("```python\nprint(1)\n```\n\n```text\n1\n```\n\nNo output:\n\n```python\nx = 2\n```\n")
    assert run([page], tmp_path) == 2
    page.write_text("```python\nprint(1)\n```\n\n```text\n2\n```\n")
    with pytest.raises(AssertionError, match=r"page.md, block 1 prints '1\\n', and shows '2\\n'"):
        run([page], tmp_path)
    page.write_text("```python\n# mine/one.py\nx = 3\n```\n\n```python\nimport mine.one\nassert mine.one.x == 4\n```\n")
    with pytest.raises(AssertionError, match="page.md, block 2"):
        run([page], tmp_path)


def test_the_kernel_of_readme_and_tutorial_is_wrong_as_they_say_and_the_mended_one_is_right():
    (shown,), (first, mended) = (
        [code for code, _ in examples(path.read_text(encoding="utf-8")) if code.startswith("# my_kernels/longflow.py")]
        for path in (ROOT / "README.md", DOCS / "tutorial" / "verify.md")
    )
    assert shown == first
    sizes = {"key_value_heads": 1, "group": 1, "head_dim": 16, "slots": 24}
    free_slots = DecodeCase(**sizes, seed=1, occupancy="random", poison="nan")
    underflow = DecodeCase(**sizes, seed=1, content="overflow_88")
    zeros = DecodeCase(**sizes, seed=1, content="all_zero_values", occupancy="random", poison="zero")
    for case, message in ((free_slots, "got nan"), (underflow, "scores less"), (zeros, None)):
        if message is not None:
            with pytest.raises(Mismatch, match=message):
                judge.assert_decode_right(kernel(first)(**case.inputs), case)
        judge.assert_decode_right(kernel(mended)(**case.inputs), case)
    without = "".join(line for line in mended.splitlines(keepends=True) if "lowest" not in line)
    without = without.replace("    return", "    rank = rank.masked_fill(~occupied, -torch.inf)\n    return")
    with pytest.raises(Mismatch, match="the lowest free slot, got slot 0"):
        judge.assert_decode_right(kernel(without)(**zeros.inputs), zeros)


def kernel(code):
    """`decode_attention` of a module's source."""
    namespace = {}
    exec(compile(code, "my_kernels/longflow.py", "exec"), namespace)
    return namespace["decode_attention"]


@pytest.mark.parametrize(("name", "most"), [("README.md", 9000), ("CONTRIBUTING.md", 5000)])
def test_short_files_stay_short(name, most):
    assert len((ROOT / name).read_bytes()) <= most


def links(text: str) -> list[str]:
    """The targets of relative links, outside of code."""
    text = re.sub(r"`[^`\n]*`", "", FENCE.sub("", text))
    found = re.findall(r"\]\(([^)\s]+)\)", text)
    return [target.split("#")[0] for target in found if not target.startswith(("http", "#"))]


def test_code_blocks_fit_their_column():
    """Of the pages that are not generated; the theme's column has 88 characters."""
    for page in (ROOT / "README.md", *written()):
        for language, code in FENCE.findall(page.read_text(encoding="utf-8")):
            wide = [line for line in code.splitlines() if len(line) > 88]
            assert not wide, f"{page.name}: a block of {language} is wider than 88 characters: {wide[0]}"


def test_links_lead_to_files(tmp_path):
    """Sphinx checks links between pages. This also checks those in README and CONTRIBUTING."""
    generated = generate.pages().keys() | generate.plots().keys()
    for page in (ROOT / "README.md", ROOT / "CONTRIBUTING.md", *written()):
        base = DOCS / "reference" / "methods" if page.parent == DOCS / "notes" else page.parent
        for target in links(page.read_text(encoding="utf-8")):
            path = (base / target).resolve()
            below = path.relative_to(DOCS / "reference").as_posix() if path.is_relative_to(DOCS / "reference") else ""
            assert path.exists() or below in generated, f"{page.name}: {target}"
    assert links("[a](b.md#c) `[d](e)` [f](http://g) [h](#i)\n```sh\n[j](k)\n```\n") == ["b.md"]


def test_every_method_has_notes_and_a_page():
    """A baseline may have no notes."""
    made = generate.pages()
    for pair in discovery.built_in():
        notes = DOCS / "notes" / f"{pair.name}.md"
        assert notes.is_file() or pair.is_baseline, f"{notes} needs what the method decides, and an example"
        page = made[f"methods/{pair.name}.md"]
        assert page.startswith(f"# {pair.name}\n"), notes
        assert page.count("\n## Use\n") == 1, pair
        assert ("\nPaper: " in page) is pair.has_paper, f"{notes} and the docstring of the reference"
        assert ("\n## Readings\n" in page) is pair.has_paper, f"{pair} has a paper and no readings.toml, or the reverse"
        assert re.findall(r"^## (?:API|Claims|Accuracy|Speed|Mutants)$", page, flags=re.MULTILINE) == [
            "## API", "## Claims", "## Accuracy", "## Speed", "## Mutants",
        ]  # fmt: skip
        assert all(f"### `{name}`" in page for name in pair.exports)
        assert f"\n{pair.name}\n" in made["methods/index.md"]


def test_the_table_of_methods_has_a_row_for_each_with_its_paper():
    rows = generate.methods.table().splitlines()[2:]
    for pair, row in zip(discovery.built_in(), rows, strict=True):
        assert f"(reference/methods/{pair.name}.md)" in row
        assert ("arXiv" in row or "OpenReview" in row) is pair.has_paper, f"{pair.name}: name the paper's arXiv number"
    index = (DOCS / "index.md").read_text(encoding="utf-8")
    assert index.count("<!-- methods -->") == 1


def test_papers_are_linked_outside_of_code_and_links():
    shown = generate.markdown.with_papers("a arXiv 2306.14048, `arXiv 1111.11111` [arXiv 2222.22222](x)")
    assert shown == (
        "a [arXiv 2306.14048](https://arxiv.org/abs/2306.14048), `arXiv 1111.11111` [arXiv 2222.22222](x)"
    )


def test_the_reference_shows_what_is_stored():
    """The names of options, mutants and benchmarks come from their definitions."""
    made = generate.pages()
    for option in ("--kv-impl=MODULE", "--kv-device={auto,cpu,cuda}", "--kv-update-golden"):
        assert f"`{option}`" in made["commands/pytest.md"]
    assert "--kv-methods" not in made["commands/pytest.md"]
    for modules in generate.commands.COMMANDS.values():
        for module in modules:
            (page,) = (text for text in made.values() if f"## `python -m {module}`" in text)
            assert f"usage: python -m {module}" in page or f"usage: {module}" in page, module
    for name in cli.COMMANDS:
        assert f"## `kvtwin {name}`\n\n```text\nusage: kvtwin {name}" in made["commands/verify.md"]
    for found in generate.stored.kill_matrices().values():
        assert all(f"`{mutant['name']}`" in made["results/kill-matrix.md"] for mutant in found["mutants"])
    for _, baseline in generate.stored.baselines():
        for one in baseline["benchmarks"]:
            if "milliseconds" in one["extra_info"]:
                assert f"`{one['name'].removeprefix('test_')}`" in made["results/benchmarks.md"]


def test_the_table_of_the_public_models_traces_is_what_a_run_finds(tmp_path):
    """The stored numbers of decisions; the errors depend on the processor."""
    stored = json.loads((ROOT / generate.known.TRACES).read_text(encoding="utf-8"))["methods"]
    assert list(stored) == sorted(pair.name for pair in discovery.built_in())
    command = [sys.executable, "-m", "pytest", "-q", "--kv-device=cpu", "-k", "public_model", "-p", "no:cacheprovider",
               f"--kv-report={tmp_path / 'report.json'}", "--hypothesis-profile=quick", "conformance/suite/cake"]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
    found = generate.known.of_report(json.loads((tmp_path / "report.json").read_text(encoding="utf-8")))["methods"]
    assert found["cake"][0] == stored["cake"][0] > 0
    assert f"| cake | {stored['cake'][1]} of {stored['cake'][0]} |" in generate.known.known_page()


def test_the_page_on_performance_is_what_is_stored():
    """It is in the repository. A build of the documentation writes it again."""
    page = (DOCS / generate.performance.PAGE).read_text(encoding="utf-8")
    assert page == generate.performance.page(), "build the documentation"
    assert len(page.encode()) <= 6000
    decoding = page.partition("## Prompts")[0]
    rows = {line.split(" | ")[0].removeprefix("| "): line for line in decoding.splitlines() if line.startswith("| ")}
    assert {pair.name for pair in discovery.built_in() if pair.state} <= rows.keys(), "a method without a stored time"
    for _, run in generate.stored.baselines():
        assert run["machine_info"]["gpu"] in page
        (step,) = (one["extra_info"] for one in run["benchmarks"] if (one["group"], one["name"]) == (
            "longflow", "test_step[B128-Hq32-S3200]"))  # fmt: skip
        assert f" {step['milliseconds']:#.3g} ({step['peers'][step['strongest']]['ratio']:#.3g}) |" in rows["longflow"]
    pytest.importorskip("matplotlib", reason="needs the extra plots")
    assert (DOCS / generate.performance.PLOT).read_text(encoding="utf-8") == generate.performance.plot()


def test_pages_are_written_once_and_old_ones_go(tmp_path, monkeypatch):
    monkeypatch.setattr(generate, "pages", lambda: {"methods/new.md": "# new\n"})
    (tmp_path / "methods").mkdir()
    (tmp_path / "methods" / "old.md").write_text("# old\n")
    (tmp_path / "report.md").write_text("# by hand\n")
    generate.write(tmp_path)
    names = {path.name for path in tmp_path.rglob("*") if path.is_file()}
    assert names == {"new.md", "report.md", *(Path(path).name for path in generate.plots())}
    before = (tmp_path / "methods" / "new.md").stat().st_mtime_ns
    generate.write(tmp_path)
    assert (tmp_path / "methods" / "new.md").stat().st_mtime_ns == before


def test_docstrings_become_text_that_shows_them_as_they_are():
    doc = "A [B, S] tensor; `x_i`.\n\nkey: a * b.\nvalue, n: of it\n    more. slot: x.\nRaises ValueError.\n"
    doc += "\n    code_here()"
    assert generate.markdown.prose(doc).strip() == (
        "A \\[B, S\\] tensor; `x_i`.\n\n- key: a \\* b.\n- value, n: of it more.\n- slot: x.\n\nRaises ValueError.\n\n"
        "```text\ncode_here()\n```"
    )
    table = generate.markdown.markdown_table(["a"], [["b | c"], ["d \\| e"]])
    assert table.splitlines()[2:] == ["| b \\| c |", "| d \\| e |"]
