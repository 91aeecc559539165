"""The page of a method: its notes, readings, API, what its verdict judges, claims, accuracy, speed and mutants."""

from __future__ import annotations

import importlib
import inspect
import re
import textwrap
from collections.abc import Iterable, Iterator
from types import ModuleType
from typing import Any

from . import known
from .markdown import escape, markdown_table, prose
from .stored import DOCS, baselines, benchmark_table, kill_matrices, machine_of, stored


def method_page(pair: Any) -> str:
    """One method: its notes, readings, API, what its verdict judges, claims, accuracy, speed and mutants."""
    path = DOCS / "notes" / f"{pair.name}.md"
    notes = path.read_text(encoding="utf-8") if path.is_file() else default_notes(pair)
    parts = [
        notes,
        *(() if "\n## Use\n" in notes else (use(pair),)),
        *readings(pair.name),
        f"## API\n\n`kvtwin.reference.{pair.path}` and `kvtwin.optimized.{pair.path}` export the same names, with the "
        "same signatures and result types.\n",
        *(entry(getattr(pair.reference, name), name) for name in pair.exports),
        cache_entry(pair),
        "## Verdict\n", judged(pair),
        "## Claims\n", claims(pair.name),
        "## Accuracy\n", accuracy(pair.name), known.of_method(pair.name),
        "## Speed\n", speed(pair.name),
        "## Mutants\n", mutants_summary(pair.name),
    ]  # fmt: skip
    return "\n".join(part.rstrip() + "\n" for part in parts)


def table() -> str:
    """All methods: what the reference's docstring says first, and the paper."""
    from kvtwin.conformance import discovery

    rows = []
    for pair in discovery.built_in():
        first = " ".join(inspect.cleandoc(pair.reference.__doc__ or "").split("\n\n")[0].split())
        path = DOCS / "notes" / f"{pair.name}.md"
        about = path.read_text(encoding="utf-8") if path.is_file() else pair.reference.__doc__ or ""
        paper = re.search(r"arXiv\s+\d{4}\.\d{5}|\[OpenReview [^)]*\)", about)
        rows.append([
            f"[{escape(pair.name)}](reference/methods/{pair.name}.md)", escape(first.partition(": ")[2] or first),
            paper[0].replace("\n", " ") if paper else "-",
        ])  # fmt: skip
    return markdown_table(["method", "what it does", "paper"], rows)


def default_notes(pair: Any) -> str:
    return f"# {pair.name}\n\n{prose(inspect.getdoc(pair.reference) or '')}\n"


USE = """## Use

The state is the cache of one layer. Both sides have the same names:

```python
import torch
from kvtwin.reference.{path} import {config}, {state}  # or kvtwin.optimized

state = {state}(
    {config}({budget}=64{required}), batch=1, query_heads=8,
    key_value_heads=2, head_dim=64, dtype=torch.float32, device="cpu",
)
state.prefill(*(torch.randn(1, heads, 100, 64) for heads in (8, 2, 2)))
output = state.step(*(torch.randn(1, heads, 64) for heads in (8, 2, 2)))
assert output.shape == (1, 8, 64)
assert state.occupied.sum(-1).max() == 64
```

With transformers (the extra `hf`), here with the small model that is part of kvtwin:

```python
from importlib.resources import files

from kvtwin.reference.hf import {cache}  # or kvtwin.optimized.hf, with a model on CUDA
from transformers import LlamaForCausalLM

model = LlamaForCausalLM.from_pretrained(
    files("kvtwin.fixtures") / "model", dtype=torch.float32
)
model.set_attn_implementation("kvtwin")
text = b"\\0Each layer of this model keeps 64 tokens for each KV head, and no others."
ids = torch.tensor([list(text)])
cache = {cache}(model.config, {budget}=64{required})
mask = torch.ones_like(ids)
model.generate(ids, attention_mask=mask, **cache.argument, max_new_tokens=4)
assert cache.layers[0].state.occupied.sum(-1).max() == 64
```
"""


def use(pair: Any) -> str:
    """How to use a method whose notes do not say it: its state, on both sides, and its cache for transformers."""
    from kvtwin.conformance.judge import checkers

    return USE.format(
        path=pair.path, config=pair.config.__name__, state=pair.state.__name__, cache=cache_name(pair),
        budget=checkers.ask(pair.name, "BUDGET", "budget"),
        required="".join(f", {name}={value!r}" for name, value in checkers.required(pair.name).items()),
    )


def cache_name(pair: Any) -> str:
    return f"{pair.state.__name__.removesuffix('State')}Cache"


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


def cache_entry(pair: Any) -> str:
    """The cache for transformers."""
    caches: ModuleType = importlib.import_module("kvtwin.reference.hf")
    cache = getattr(caches, cache_name(pair))
    return (
        f"### `{cache.__name__}`\n\nIn `kvtwin.reference.hf` and `kvtwin.optimized.hf`; see "
        f"[Use a method with transformers](../../how-to/transformers.md).\n\n{prose(own_doc(cache))}"
    )


def judged(pair: Any) -> str:
    """What a verdict on an implementation of the method judges: the fields of each function's results, and of the
    state's; and the functions that it does not judge."""
    from kvtwin.conformance.judge import subjects

    own = [one for one in subjects.every() if one.method == pair.name]
    lines = [
        "[The verdict](../../how-to/test-your-kernel.md) on an implementation judges these fields. Numbers have error "
        "bounds, and belong to the property `accuracy`; choices belong to `decisions` and `ties`.\n",
        "| function or state | numbers | choices |", "|---|---|---|",
    ]
    for one in own:
        name = f"`{one.name}`" + (f", {one.variant.replace('_', ' ')}" if one.variant else "")
        lines.append(f"| {name} | {', '.join(one.numbers) or '-'} | {', '.join(one.choices) or '-'} |")
    names = {one.name for one in own}
    others = [
        name for name in pair.exports if name not in names and inspect.isfunction(getattr(pair.reference, name))
    ]
    if others:
        lines.append(f"\nNo property judges {', '.join(f'`{name}`' for name in others)}; the method's tests do.")
    if pair.state is not None:
        lines.append(f"\n{attributes(pair)}")
    return "\n".join(lines) + "\n"


def attributes(pair: Any) -> str:
    """What a state of another package needs, and which tensors it may lack."""
    import torch

    from kvtwin.conformance.judge import checkers, lacking

    state = pair.state(
        checkers.small_config(pair, 8, {}), batch=1, query_heads=4, key_value_heads=2, head_dim=16, dtype=torch.float32,
        device="cpu",
    )
    names = [name for name in dir(state) if not name.startswith("_")]
    methods = [name for name in names if inspect.isfunction(inspect.getattr_static(pair.state, name, None))]
    tensors = [name for name in names if isinstance(getattr(state, name), torch.Tensor) and name not in lacking.NEEDED]

    def listed(names: Iterable[str]) -> str:
        return ", ".join(f"`{name}`" for name in names)

    return (
        f"A `{pair.state.__name__}` of another package needs {listed(lacking.NEEDED)}. It may lack the methods "
        f"{listed(name for name in methods if name not in lacking.METHODS)}; and it may lack, or have `None` in place "
        f"of, the tensors {listed(tensors)}. Tests that use them are *not provided* then."
    )


def readings(name: str) -> Iterator[str]:
    """Where the method's paper leaves a choice; nothing for a method without a paper."""
    from kvtwin.conformance import readings

    own = [one for one in readings.load() if one.method == name]
    if own:
        options = sum(bool(one.options) for one in own)
        yield (
            f"## Readings\n\nThe paper leaves a choice at {len(own)} places. At {options} of them, an option of the "
            f"config or an argument of a function gives the other reading.\n\n{readings.table(own)}\n"
        )


def claims(name: str) -> str:
    """The ledger's claims of this method, each with its verdict."""
    from kvtwin.conformance import ledger

    own = [claim for claim in ledger.load() if claim.method == name]
    if not own:
        return "No ledger: this method is a baseline, and the claims of its paper are not examined.\n"
    left_out = [one for one in ledger.omitted() if one.method == name]
    shown = ledger.table(own, left_out, ledger.sources())
    return f"{shown}\n\n[The claims ledger](../../explanation/ledger.md) explains the verdicts.\n"


def accuracy(name: str) -> str:
    from kvtwin.fixtures import accuracy_plot

    result = stored("accuracy")
    whole = result["rows"][0]["method"]
    rows = [row for row in result["rows"] if row["method"] == whole or row["method"].split(" (")[0] == name]
    if len(rows) == 1:
        return "Not measured.\n"
    return (
        f"{accuracy_plot.markdown({**result, 'rows': rows})}\n\nOn the small model of this repository, by share of the "
        "context that the cache holds; see [Accuracy](../results/accuracy.md).\n"
    )


def speed(name: str) -> str:
    """The stored benchmarks of this method, for each machine."""
    parts = []
    for _, run in baselines():
        own = [one for one in run["benchmarks"] if one["group"] == name]
        if own:
            parts.append(f"{machine_of(run)}.\n\n{benchmark_table(own)}\n")
    if not parts:
        return "No stored benchmark.\n"
    return "\n".join(parts) + "\n[Benchmarks](../results/benchmarks.md) explains the columns.\n"


def mutants_summary(name: str) -> str:
    found = kill_matrices().get(name)
    if found is None:
        return "No stored kill matrix.\n"
    killed = sum(one["status"] == "killed" for one in found["mutants"])
    count = len(found["mutants"])
    return f"{killed} of {count} mutants are killed; see [the kill matrix](../results/kill-matrix.md).\n"
