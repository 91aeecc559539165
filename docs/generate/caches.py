"""The page of the caches' API: the options of all caches for transformers, from their classes."""

from __future__ import annotations

import inspect
from typing import Any

from .markdown import markdown_table, prose
from .methods import entry, own_doc

HEAD = """# The caches' API

`kvtwin.reference.hf` and `kvtwin.optimized.hf` have the same caches, with the same options. How to use them:
[Use a method with transformers](../../how-to/transformers.md).

## All caches

Each cache takes the option of the column "required" and generates. `budget` is a number of tokens;
`compression_ratio` gives the budget `max(1, int(T * (1 - compression_ratio)))` for a first forward pass of T tokens.
All caches take `attention_mask` too. An option of None depends on others, see the method's page. Those with a star have
no default in the method's config: the values are ours for `budget=1024`, with which the method's accuracy is measured.

"""
#: Options that the head of the page explains.
SHARED = ("budget", "compression_ratio", "attention_mask")


def caches_page() -> str:
    """Every cache: its required options, and the defaults of the others."""
    from transformers import LlamaConfig, LlamaForCausalLM

    from kvtwin.reference import hf
    from kvtwin.reference.hf import block_caches
    from kvtwin.reference.hf.cache_adapter import StateCache

    sizes = {"vocab_size": 2, "hidden_size": 8, "intermediate_size": 8, "num_attention_heads": 1}
    of = LlamaForCausalLM(LlamaConfig(**sizes, bos_token_id=None, eos_token_id=None))
    caches = {method: getattr(hf, name) for method, name in block_caches.names().items()}
    rows = [row(method, cache, of) for method, cache in caches.items()]
    parts = [
        HEAD + markdown_table(["cache", "first argument", "required", "options and defaults"], rows),
        "## By name\n", entry(hf.cache, "cache"),
        "## What all caches have\n", prose(own_doc(StateCache)),
        *(f"- `{name}`: {inspect.getdoc(vars(base)[name])}" for base in StateCache.__mro__
          for name in ("nbytes", "full_nbytes") if name in vars(base)),
    ]  # fmt: skip
    return "\n".join(part.rstrip() + "\n" for part in parts)


def required(cache: Any, first: Any) -> str:
    """The options of which a cache needs one, found by leaving them out."""
    def takes(**options: Any) -> bool:
        try:
            cache(first, **options)
            return True
        except TypeError:
            return False

    sizes = {"budget": 1024, "k": 1024, "compression_ratio": 0.5}
    needed = [] if takes() else [f"`{name}`" for name, value in sizes.items() if takes(**{name: value})]
    return " or ".join(needed) or "-"


def row(method: str, cache: Any, of: Any) -> list[str]:
    """of: a model."""
    first, *others = inspect.signature(cache).parameters.values()
    ours = getattr(cache.Config, "defaults_for", lambda budget, given: {})(1024, {})
    values = {one.name: one.default for one in others if one.name not in SHARED}
    if isinstance(getattr(cache.Config, "budget", None), int):
        values = {"budget": cache.Config.budget, **values}
    options = [f"`{name}={ours.get(name, value)!r}`" + " \\*" * (name in ours) for name, value in values.items()]
    return [
        f"[`{cache.__name__}`](../methods/{method}.md)", "`model`" if first.name == "model" else "`model.config`",
        required(cache, of if first.name == "model" else of.config), ", ".join(options),
    ]  # fmt: skip
