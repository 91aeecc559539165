"""Sphinx: python -m sphinx -W -n -b html docs docs/_build/html (python -m tox -e docs)."""

from __future__ import annotations

import sys
from importlib.metadata import version as installed
from pathlib import Path

from docutils import nodes

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))

import generate  # noqa: E402  a package beside this file
from latex2mathml.converter import convert  # noqa: E402

project = "kvtwin"
author = "the kvtwin authors"
release = version = installed("kvtwin")

extensions = ["myst_parser"]
exclude_patterns = ["_build", "notes"]
myst_enable_extensions = ["attrs_inline", "colon_fence", "deflist", "dollarmath"]
myst_heading_anchors = 3
nitpicky = True

html_math_renderer = "mathml"  # browsers show it without a script from elsewhere
html_theme = "furo"
html_title = f"kvtwin {release}"
html_static_path = ["_static"]
html_css_files = ["kvtwin.css"]
html_theme_options = {"navigation_with_keys": True}
html_show_copyright = False


def setup(app):
    app.connect("builder-inited", lambda app: generate.write(Path(app.srcdir) / "reference"))
    app.connect("builder-inited", lambda app: generate.performance.write())
    app.connect("source-read", completed)
    app.add_html_math_renderer("mathml", (inline_math, None), (display_math, None))


def inline_math(translator, node):
    translator.body.append(convert(node.astext()))
    raise nodes.SkipNode


def display_math(translator, node):
    translator.body.append(f"<div class=\"math\">{convert(node.astext(), display='block')}</div>")
    raise nodes.SkipNode


def completed(app, docname, source):
    """A page with what follows from other sources: links to claims and papers, the table of methods."""
    if docname == "explanation/claims":
        source[0] = generate.results.linked(source[0])
    if docname == "index":
        source[0] = source[0].replace("<!-- methods -->", generate.methods.table())
    source[0] = generate.markdown.with_papers(source[0])
