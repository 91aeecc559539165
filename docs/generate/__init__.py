"""Write the generated part of the reference: pages that follow from code, ledgers and stored results.

Each build of the documentation does it: `write` makes docs/reference/{methods,api,caches,results,commands}, and
`performance.write` the page on performance. Nothing in these folders is edited by hand. Prose about a method is in
docs/notes/NAME.md and is included at the top of its page. A baseline may have no such file: its page then begins with
the docstring of its reference.
"""

from __future__ import annotations

from pathlib import Path

from . import claims_plot, known
from . import performance as performance
from .api import api_page
from .caches import caches_page
from .commands import command_pages
from .markdown import index
from .methods import method_page
from .results import result_pages
from .stored import PLOTS, read

FOLDERS = ("methods", "api", "caches", "results", "commands")


def pages() -> dict[str, str]:
    """Every generated page: its path below docs/reference, and its Markdown."""
    from kvtwin.conformance import discovery

    found = {f"methods/{pair.name}.md": method_page(pair) for pair in discovery.built_in()}
    found["methods/index.md"] = index(
        "Methods", "One page per method: use, readings, API, claims, accuracy, speed and mutants.",
        [pair.name for pair in discovery.built_in()],
    )
    found["api/index.md"] = api_page()
    found["caches/index.md"] = caches_page()
    found |= {f"results/{name}.md": text for name, text in result_pages().items()}
    found["results/index.md"] = index("Results", "Stored results, as they are in the repository.", list(result_pages()))
    found |= {f"commands/{name}.md": text for name, text in command_pages().items()}
    found["commands/index.md"] = index(
        "Commands and options", "Command lines and pytest options, from the programs themselves.", list(command_pages())
    )
    return found


def plots() -> dict[str, str]:
    """Every plot of the results: its path below docs/reference, and its SVG."""
    return {"results/claims.svg": claims_plot.svg()} | {
        f"results/{name}.svg": read(f"fixtures/{name}.svg") for name in PLOTS
    } | known.plots()


def write(folder: Path) -> None:
    """Write all pages and plots below `folder`, and delete what is left of an earlier build."""
    made = {folder / path: text.encode() for path, text in pages().items()}
    made |= {folder / path: text.encode() for path, text in plots().items()}
    for name in FOLDERS:
        for path in (folder / name).rglob("*"):
            if path.is_file() and path not in made:
                path.unlink()
    for path, content in made.items():
        if not path.is_file() or path.read_bytes() != content:  # an unchanged page is not built again
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content)
