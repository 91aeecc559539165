"""Caches for the methods whose State takes blocks. They are derived from Config and State: such a method needs no file
here. A module of its own, ``<method>.py``, takes precedence."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import fields
from functools import cache
from importlib import import_module
from pkgutil import iter_modules
from typing import Any

from .cache_adapter import StateCache
from .options import FROM_MODEL, did_you_mean
from .rotation import PLAIN, RotatedCache

DOCUMENTATION = """A {method} cache for `generate`: at most `budget` tokens per layer, row and KV head{longer}.

    model.set_attn_implementation("kvtwin")
    cache = {name}(model.config, budget=1024)
    model.generate(ids, **cache.argument, prefill_chunk_size=128)

The options are those of {config}: {options}. The model gives scale and softcap. A prompt comes in blocks of
block_size tokens, which a layer holds beside its budget; prefill_chunk_size bounds the model's activations. The slots
are in `cache.layers[i].state`, a `{state}`. Arguments, padding, turns and errors:
`kvtwin.reference.hf.cache_adapter.StateCache`.

{rotation}{side}
"""
#: About the option of methods that can rotate by places in the cache.
ROTATION = """With rerotate_keys=True, queries and keys are rotated by their places in the cache instead of their
positions in the text. The cache undoes the model's rotation and rounds the result to the model's dtype. The model must
hold its frequencies in float32, as `from_pretrained` leaves them. NotImplementedError unless its model_type is one of
{models}, with the default rotary embedding.

"""
SIDES = {
    "kvtwin.reference": "It runs the eager reference, in float64 to bfloat16.",
    "kvtwin.optimized": "It runs the Triton kernels, in float32 to bfloat16. A model on the CPU needs Triton's "
    "interpreter:\nTRITON_INTERPRET=1 before anything imports triton, which importing a transformers model does.",
}


@cache
def names() -> dict[str, str]:
    """The cache of each method by the method's name, {"h2o": "H2OCache", ...}, the same on both sides. Imports the
    reference's methods."""
    package, found = __name__.rpartition(".")[0], {}
    reference = package.removesuffix(".hf")
    for folder, kind in ((package, "Cache"), (reference, "State"), (f"{reference}.baselines", "State")):
        for one in iter_modules(import_module(folder).__path__):
            for name, value in vars(import_module(f"{folder}.{one.name}")).items():
                ours = kind == "Cache" or hasattr(value, "append_block")
                if ours and name.lower() == f"{one.name.replace('_', '')}{kind.lower()}":
                    found[one.name] = name.removesuffix(kind) + "Cache"
    return dict(sorted(found.items()))


def attribute(package: str, path: Iterable[str], made: dict[str, Any], name: str) -> Any:
    """NAMECache of a side: from the module of the folder `path` with its name, or derived from a State that takes
    blocks. AttributeError for any other name. made: where a derived class stays, to be the same each time."""
    for found in iter_modules(path):
        if f"{found.name.replace('_', '')}cache" == name.lower():
            return getattr(import_module(f"{package}.{found.name}"), name)
    derived = find(name, package.removesuffix(".hf"), package)
    if derived is None:
        raise AttributeError(f"module {package!r} has no attribute {name!r}")
    return made.setdefault(name, derived)


def by_name(package: str, method: str, model: Any, options: dict[str, Any]) -> StateCache:
    """See `kvtwin.reference.hf.cache`."""
    if method not in names():
        raise ValueError(f"there is no cache {method!r}{did_you_mean(method, names())}")
    kind = getattr(import_module(package), names()[method])
    first = model if "model" in kind.__signature__.parameters else getattr(model, "config", model)
    found: StateCache = kind(first, **options)
    return found


def find(name: str, side: str, package: str) -> type[StateCache] | None:
    """The class NAMECache of one side, None if no method with a block State has this name.

    side: "kvtwin.reference" or "kvtwin.optimized", where the method is looked for, or in its ``baselines``. package:
    the module that the class claims to be from.
    """
    method = name.removesuffix("Cache")
    if method == name:
        return None
    for folder in (side, f"{side}.baselines"):
        for found in iter_modules(import_module(folder).__path__):
            if found.name.replace("_", "") == method.lower():
                module = import_module(f"{folder}.{found.name}")
                state, config = getattr(module, f"{method}State", None), getattr(module, f"{method}Config", None)
                if state is not None and hasattr(state, "append_block") and config is not None:
                    return _derived(name, config, state, side, package)
    return None


def _derived(name: str, config: type, state: type, side: str, package: str) -> type[StateCache]:
    options = [field.name for field in fields(config) if field.name not in ("budget", *FROM_MODEL)]
    rotates = "inv_freq" in options
    options = ["rerotate_keys" if name == "inv_freq" else name for name in options]
    text = DOCUMENTATION.format(
        method=name.removesuffix("Cache"), name=name, config=config.__name__, options=", ".join(options),
        state=state.__name__, side=SIDES[side], longer=", and interval - 1 more" if "interval" in options else "",
        rotation=ROTATION.format(models=", ".join(PLAIN)) if rotates else "",
    )
    base = RotatedCache if rotates else StateCache
    return type(name, (base,), {"__doc__": text, "__module__": package, "Config": config, "State": state})
