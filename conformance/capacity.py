"""Number of requests that fit on a GPU: python -m kvtwin.conformance.capacity --model llama-3.1-8b --memory 80GB

Bytes are counted, not estimated: for each method with a budget, the optimized state of one layer is created with the
model's sizes, and the bytes of all its tensors are added (keys, values, positions, scores, scratch). EpiKV's scorer
counts once per request, everything else once per layer. ThinKV's pools depend on the thoughts of the model: 4.5 bits
per number are counted, as for reasoning tokens, without its tables. Weights are in bfloat16; activations are not
counted.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from . import discovery
from .command_line import Parser, number

ITEM = 2  # bytes of a bfloat16 number


@dataclass(frozen=True)
class Model:
    """layers, query heads, KV heads, head_dim, the size of a hidden state, parameters."""

    layers: int
    query_heads: int
    key_value_heads: int
    head_dim: int
    hidden_size: int
    parameters: int

    @property
    def scalars_per_token(self) -> int:
        """Numbers in a token's keys and values, in all layers."""
        return 2 * self.layers * self.key_value_heads * self.head_dim

    @property
    def bytes_per_token(self) -> int:
        return self.scalars_per_token * ITEM

    @property
    def weights(self) -> int:
        return self.parameters * ITEM


MODELS = {
    "llama-3.1-8b": Model(32, 32, 8, 128, 4096, 8_030_261_248),
    "qwen3-8b": Model(36, 32, 8, 128, 4096, 8_190_735_360),
    "qwen3-1.7b": Model(28, 16, 8, 128, 2048, 1_720_574_976),
    "fixture": Model(8, 8, 4, 32, 256, 3_608_832),
}

#: Tokens. A state with a larger budget may not fit in the memory of the host, on which its tensors are counted.
MOST_CONTEXT, MOST_BUDGET = 10**8, 2**20
MOST_MEMORY = 10**18  # bytes

UNITS = {"B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}


@dataclass(frozen=True)
class Row:
    """One method. bytes_per_token: per further token, in all layers; bytes_per_request: at the budget."""

    method: str
    bytes_per_token: float
    bytes_per_request: int
    requests: int


def memory_of(text: str) -> int:
    """"80GB" (10^9) or "80GiB" (2^30) in bytes. ValueError for anything else, and above MOST_MEMORY."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMG]i?B|B)", text.strip(), re.IGNORECASE)
    if not found:
        raise ValueError(f"memory must be a number and B, KB, MB, GB, KiB, MiB or GiB, got {text!r}")
    size = float(found[1]) * UNITS[found[2].upper()]
    if size > MOST_MEMORY:
        raise ValueError(f"memory must be at most {MOST_MEMORY:,} bytes, got {text!r}")
    return round(size)


def requests(pool: int, each: int) -> int:
    """The number of requests of `each` bytes that fit in `pool` bytes."""
    return max(0, pool) // each


def bytes_held(value: Any, seen: set[int] | None = None) -> int:
    """The bytes of all tensors that one of our objects holds; shared memory counts once."""
    import torch

    seen = set() if seen is None else seen
    if isinstance(value, torch.Tensor):
        storage = value.untyped_storage()
        if storage.data_ptr() in seen:
            return 0
        seen.add(storage.data_ptr())
        return storage.nbytes()
    if isinstance(value, dict):
        return sum(bytes_held(part, seen) for part in value.values())
    if isinstance(value, (list, tuple)):
        return sum(bytes_held(part, seen) for part in value)
    if discovery.is_ours(type(value)) and hasattr(value, "__dict__"):
        return bytes_held(vars(value), seen)
    return 0


def measured(method: str, model: Model, budget: int) -> int:
    """Bytes of a request with this method, in all layers of the model."""
    import torch

    from ..optimized._common.launch import INTERPRETED
    from .judge import checkers

    pair = checkers.pair(method)
    assert pair.config is not None
    assert pair.state is not None
    options = checkers.required(method) | ({"hidden_size": model.hidden_size} if method == "epikv" else {})
    state = getattr(checkers.module(_optimized(), pair), pair.state.__name__)(
        pair.config(budget=budget, **options), batch=1, query_heads=model.query_heads,
        key_value_heads=model.key_value_heads, head_dim=model.head_dim, dtype=torch.bfloat16,
        device="cpu" if INTERPRETED else "cuda",
    )
    once = bytes_held(getattr(state, "scorer", None))
    return model.layers * (bytes_held(state) - once) + once


def _optimized() -> Any:
    from .harness.impl import Twins

    return Twins().optimized


def table(model: Model, memory: int, context: int, budget: int) -> list[Row]:
    """A row per method that evicts tokens beyond a budget, and one for "full", which keeps the whole context."""
    import inspect

    from .judge import checkers

    pool = memory - model.weights
    full = model.bytes_per_token * context
    rows = [Row("full", model.bytes_per_token, full, requests(pool, full))]
    for pair in discovery.methods():
        if pair.name == "thinkv":
            per_token = model.scalars_per_token * 4.5 / 8
            each = round(per_token * budget)
        elif (
            pair.config is None or "budget" not in inspect.signature(pair.config).parameters
            or not checkers.ask(pair.name, "EVICTS", True)
        ):
            continue
        else:
            each = measured(pair.name, model, budget)
            per_token = (measured(pair.name, model, 2 * budget) - each) / budget
        rows.append(Row(pair.name, per_token, each, requests(pool, each)))
    return rows


def main(arguments: Sequence[str] | None = None, prog: str | None = None) -> int:
    parser = Parser(
        prog=prog, description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", choices=sorted(MODELS), default="llama-3.1-8b")
    parser.add_argument("--memory", default="80GB", help="GPU memory, such as 80GB or 80GiB (default: %(default)s)")
    for name, most, default, says in (
        ("context", MOST_CONTEXT, 32768, "tokens per request"),
        ("budget", MOST_BUDGET, 2048, "tokens that a method keeps"),
    ):
        parser.add_argument(
            f"--{name}", type=number(1, most), default=default, metavar="N", help=f"{says} (default: %(default)s)"
        )
    parser.add_argument("--json", action="store_true", help="print JSON")
    options = parser.parse_args(arguments)
    try:
        memory = memory_of(options.memory)
    except ValueError as error:
        parser.error(str(error))
    from . import interpreter

    interpreter.turn_on()  # states are created on the CPU; no kernel runs
    rows = table(MODELS[options.model], memory, options.context, options.budget)
    if options.json:
        print(json.dumps([row.__dict__ for row in rows], indent=2))
        return 0
    print(f"{options.model}, {options.memory}, {options.context} tokens per request, budget {options.budget}")
    print(f"{'method':16}{'bytes per token':>18}{'MiB per request':>18}{'requests':>10}")
    for row in rows:
        print(f"{row.method:16}{row.bytes_per_token:18,.0f}{row.bytes_per_request / 2**20:18.1f}{row.requests:10d}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
