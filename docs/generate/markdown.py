"""Markdown from docstrings and tables."""

from __future__ import annotations

import re
from collections.abc import Iterable

ARXIV = re.compile(r"arXiv\s+(\d{4}\.\d{5})")
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


def with_papers(text: str) -> str:
    """Markdown whose "arXiv 2306.14048" is a link, outside of code and of other links."""
    parts = re.split(r"(^```.*?^```$|`[^`\n]+`|\[[^\]]*\]\([^)]*\))", text, flags=re.MULTILINE | re.DOTALL)
    link = r"[arXiv \1](https://arxiv.org/abs/\1)"
    return "".join(part if number % 2 else ARXIV.sub(link, part) for number, part in enumerate(parts))


def index(title: str, about: str, names: Iterable[str]) -> str:
    lines = "\n".join(names)
    return f"# {title}\n\n{about}\n\n```{{toctree}}\n:maxdepth: 1\n\n{lines}\n```\n"


def markdown_table(columns: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    head = list(columns)
    lines = [f"| {' | '.join(head)} |", "|---" * len(head) + "|"]
    for row in rows:
        cells = [re.sub(r"(?<!\\)\|", r"\|", cell) for cell in row]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)
