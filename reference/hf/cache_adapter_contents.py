"""What a cache holds: the objects that it consists of, their bytes, and its tokens. For people, not for the model."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from enum import Enum
from typing import Any

import torch
from torch import Tensor

from ..contract.arguments import capturing

PACKAGE = __name__.partition(".")[0]
#: The options that say how much a cache holds.
SIZES = ("budget", "k", "bits", "key_bits", "value_bits")


def parts(cache: object) -> list[object]:
    """The cache and the objects of this package that it consists of, each once."""
    found = {id(cache): cache}
    waiting = [cache]
    while waiting:
        for value in flat(vars(waiting.pop()).values()):
            ours = type(value).__module__.startswith(PACKAGE) and hasattr(value, "__dict__")
            if ours and id(value) not in found and not isinstance(value, Enum):
                found[id(value)] = value
                waiting.append(value)
    return list(found.values())


def flat(values: Iterable[Any]) -> Iterator[Any]:
    """The values, with what is in containers instead of these."""
    for value in values:
        if isinstance(value, (tuple, list, set)):
            yield from flat(value)
        elif isinstance(value, dict):
            yield from flat(value.values())
        else:
            yield value


def nbytes(roots: Iterable[object]) -> int:
    """The bytes of all memory that tensors of these objects are in, each once, on all devices."""
    held = (value for root in roots for part in parts(root) for value in flat(vars(part).values()))
    memory = (tensor.untyped_storage() for tensor in held if isinstance(tensor, Tensor))
    return sum({(one.device, one.data_ptr()): one.nbytes() for one in memory}.values())


def most_tokens(states: Iterable[Any]) -> int:
    """The most tokens that a KV head of a row holds in any of these states. Waits once for each device."""
    found: dict[torch.device, list[Tensor]] = {}
    for state in states:
        occupied: Tensor = state.occupied
        found.setdefault(occupied.device, []).append(occupied.sum(-1).max())
    return max(int(torch.stack(counts).max()) for counts in found.values())


def in_words(count: float) -> str:
    """"1.5 MB" for a number of bytes."""
    power = next((power for power in (3, 2, 1) if count >= 1000**power), 0)
    return f"{count / 1000**power:.3g} {('B', 'kB', 'MB', 'GB')[power]}"


def description(cache: Any) -> str:
    """The text of `repr(cache)`. Reads no tensor during a capture, and then does not say how many tokens there are."""
    layers = [layer for layer in cache.layers if hasattr(layer, "pending")]
    sizes = [f"{name} {getattr(cache.config, name)}" for name in SIZES if hasattr(cache.config, name)]
    if cache.compression_ratio is not None:
        begun = any(layer._begun for layer in layers)       # before, the budget is provisional
        sizes = [*(sizes if begun else ()), f"compression_ratio {cache.compression_ratio}"]
    others = len(cache.layers) - len(layers)
    of = f"{len(layers)} layers" + (f" and {others} of transformers" if others else "")
    used = [layer for layer in layers if layer.state is not None]
    side = ".".join(cache.State.__module__.split(".")[:2])
    return f"<{type(cache).__name__} of {side}: {', '.join((*sizes, of))}; {_tokens(cache, used)}>"


def _tokens(cache: Any, used: list[Any]) -> str:
    held = in_words(cache.nbytes)
    if any(capturing(layer.device) for layer in used):
        return f"{held}, during a capture"
    seen = cache.get_seq_length()
    if not used or not seen:
        return f"no tokens, {held}"
    most = most_tokens(layer.state for layer in used)
    return f"{most} of {seen} tokens, {held} (full cache: {in_words(cache.full_nbytes)})"
