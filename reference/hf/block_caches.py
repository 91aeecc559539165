"""Caches for the methods whose State takes blocks. They are derived from Config and State: such a method needs no file
here. A module of its own, ``<method>.py``, takes precedence."""

from __future__ import annotations

from dataclasses import fields
from importlib import import_module
from pkgutil import iter_modules

from .cache_adapter import StateCache
from .rotation import PLAIN, RotatedCache

DOCUMENTATION = """A {method} cache for `generate`: at most `budget` tokens per layer, row and KV head{longer}.

    model.set_attn_implementation("kvtwin")
    cache = {name}(model.config, budget=1024)
    model.generate(ids, **cache.argument, prefill_chunk_size=128)

The options are those of {config}: {options}. The model gives the scale. The layer processes a prompt in blocks of
block_size tokens, which it holds beside its budget; prefill_chunk_size bounds the model's activations. The slots are in
`cache.layers[i].state`, a `{state}`. Arguments, padding, turns and errors:
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
    options = [field.name for field in fields(config) if field.name not in ("budget", "scale")]
    rotates = "inv_freq" in options
    options = ["rerotate_keys" if name == "inv_freq" else name for name in options]
    text = DOCUMENTATION.format(
        method=name.removesuffix("Cache"), name=name, config=config.__name__, options=", ".join(options),
        state=state.__name__, side=SIDES[side], longer=", and interval - 1 more" if "interval" in options else "",
        rotation=ROTATION.format(models=", ".join(PLAIN)) if rotates else "",
    )
    base = RotatedCache if rotates else StateCache
    return type(name, (base,), {"__doc__": text, "__module__": package, "Config": config, "State": state})
