"""What a user gets: transformers' `generate` with each cache, eager, with `captured`, and compiled by transformers,
beside transformers' own caches.

    python -m perf.headline.generate --out FOLDER --shapes 1x32K --only LongFlow --only DynamicCache --limit 500

Models of the shape of Qwen3-8B and Llama-3.1-8B with random weights in bfloat16; prompts of random tokens. Measured are
the time to the first token, the median time of a token, and the peak of memory beyond the weights. Each round measures
every system once, so that what else the machine does affects all of them. A system's first call in a process compiles
kernels: it does not count, and `seconds_of_first_call` is its time to the first token.

Each measurement is a line of FOLDER/generate.jsonl. A run begins no measurement after its limit, and the next run with
the same folder goes on where it ended. Also an experiment of `python -m perf.headline`.
"""

from __future__ import annotations

import argparse
import gc
import hashlib
import json
import statistics
import sys
import time
import warnings
from collections.abc import Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .base import Run

BUDGET, STEPS, ROUNDS = 2048, 64, 3
#: Tokens at the beginning whose times do not count: one without a graph, one of the capture.
FIRST = 3
MAX_TOKENS = {"max_tokens": None}                       # None: of the prompt and of all steps
#: Options of our caches. "budget" stands for BUDGET.
CACHES: dict[str, dict[str, Any]] = {
    **{name: {"budget": BUDGET} for name in ("LongFlow", "KeyDiff", "H2O", "TOVA", "StreamingLLM", "CAKE", "VATP",
                                             "Random")},
    # It keeps the prompt, and so many tokens after it.
    "EpiKV": {"budget": BUDGET, "count_prompt": False, "max_prompt": None},
    **{name: {"budget": BUDGET, "interval": 128} for name in ("SnapKV", "RKV")},
    **{name: {"budget": BUDGET, "alpha": 1e-4} for name in ("RaaS", "LazyEviction")},
    "LagKV": {"budget": BUDGET, "lag": 128}, "SyncKV": {"k": BUDGET // 2, **MAX_TOKENS},
    "Quest": {"budget": BUDGET, **MAX_TOKENS}, "KIVI": {"key_bits": 2, "value_bits": 2, **MAX_TOKENS},
    "ThinKV": {"budget": BUDGET, "tau": 32, **MAX_TOKENS}, "PMKVQ": {"bits": 4, **MAX_TOKENS},
}
#: Peers: transformers' caches, with sdpa. The second is compiled, as transformers does by itself.
DYNAMIC, STATIC = "DynamicCache", "StaticCache, compiled"
PEERS = (DYNAMIC, STATIC)
CAPTURED, COMPILED = ", captured", ", compiled"
FIGURES = ("seconds_to_first_token", "ms_per_token", "peak_bytes", "seconds_of_first_call")
#: Caches of which `generate` compiles no steps.
NOT_COMPILEABLE = {"ThinKV", "SyncKV", "EpiKV", "CAKE"}
SYSTEMS = (*PEERS, *(
    f"{name}{how}" for name in CACHES for how in ("", CAPTURED, COMPILED)
    if how != COMPILED or name not in NOT_COMPILEABLE
))
_SIZES = {
    "hidden_size": 4096, "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 32000,
    "max_position_embeddings": 2**17, "tie_word_embeddings": False, "initializer_range": 0.03,
    "eos_token_id": None, "bos_token_id": None, "pad_token_id": 0,
}
#: The class's prefix, and its sizes.
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "Qwen3-8B": ("Qwen3", {**_SIZES, "intermediate_size": 12288, "num_hidden_layers": 36}),
    "Llama-3.1-8B": ("Llama", {**_SIZES, "intermediate_size": 14336, "num_hidden_layers": 32}),
}
TINY = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "vocab_size": 96,
}


class Shape(NamedTuple):
    """A batch of prompts."""

    rows: int
    tokens: int

    def __str__(self) -> str:
        return f"{self.rows}x{self.tokens // 1024}K" if self.tokens % 1024 == 0 else f"{self.rows}x{self.tokens}"


SHAPES = (Shape(1, 32 * 1024), Shape(16, 8 * 1024), Shape(64, 4 * 1024))


def shape_of(text: str) -> Shape:
    """A shape such as 1x32K."""
    rows, _, tokens = text.partition("x")
    number, times = (tokens[:-1], 1024) if tokens.endswith("K") else (tokens, 1)
    if not (rows.isdigit() and number.isdigit()):
        raise argparse.ArgumentTypeError(f"expected ROWSxTOKENS, such as 1x32K, got {text!r}")
    return Shape(int(rows), int(number) * times)


class Plan(NamedTuple):
    """What to measure, and until when (seconds of this run)."""

    models: tuple[str, ...] = tuple(MODELS)
    shapes: tuple[Shape, ...] = SHAPES
    systems: tuple[str, ...] = SYSTEMS
    limit: float = 3600.0
    steps: int = STEPS
    rounds: int = ROUNDS


TINY_PLAN = Plan(
    tuple(MODELS)[:1], (Shape(1, 12),), (DYNAMIC, STATIC, "LongFlow", f"LongFlow{CAPTURED}"), steps=6, rounds=1
)


# Rows of the file -----------------------------------------------------------------------------------------------------


def stored(path: Path) -> list[dict[str, Any]]:
    """The measurements so far. A line that a run could not finish is left out."""
    found = []
    for line in path.read_text(encoding="utf-8").splitlines() if path.is_file() else ():
        try:
            found.append(json.loads(line))
        except json.JSONDecodeError:
            continue
    return found


def following(plan: Plan, rows: list[dict[str, Any]]) -> tuple[str, Shape, str] | None:
    """What is to be measured next: model by model, shape by shape, and there in rounds. None if all is done: after an
    error, a system is measured no more."""
    for model in plan.models:
        for shape in plan.shapes:
            mine = {
                system: [row for row in rows if key_of(row) == (model, str(shape), system)] for system in plan.systems
            }
            left = [
                system for system, done in mine.items()
                if len(done) < plan.rounds and not any("error" in row for row in done)
            ]
            if left:
                return model, shape, min(left, key=lambda system: len(mine[system]))
    return None


def key_of(row: Mapping[str, Any]) -> tuple[str, str, str]:
    return row["model"], row["shape"], row["system"]


def medians(rows: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """The figures of each model and shape: by system, the medians over rounds, or the error."""
    found: dict[str, dict[str, Any]] = {}
    for row in rows:
        model, shape, system = key_of(row)
        found.setdefault(f"{model} {shape}", {}).setdefault(system, []).append(row)
    return {name: {system: _median(mine) for system, mine in systems.items()} for name, systems in found.items()}


def _median(rows: list[dict[str, Any]]) -> dict[str, Any]:
    errors = [row["error"] for row in rows if "error" in row]
    if errors:
        return {"error": errors[-1]}
    figures = {name: statistics.median(row[name] for row in rows if name in row) for name in FIGURES}
    return figures | {"rounds": len(rows)}


# Measurements ---------------------------------------------------------------------------------------------------------


class Clock:
    """A logits processor that records the time after each forward pass, on the device."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.times = [self._now()]

    def _now(self) -> Any:
        if self.device.type != "cuda":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        self.times.append(self._now())
        return scores

    def milliseconds(self) -> list[float]:
        """To the first token, and of each later one."""
        if self.device.type != "cuda":
            return [1000 * (later - before) for before, later in zip(self.times, self.times[1:], strict=False)]
        torch.cuda.synchronize(self.device)
        return [before.elapsed_time(later) for before, later in zip(self.times, self.times[1:], strict=False)]


def build(name: str, device: torch.device, *, tiny: bool) -> Any:
    """A model with random weights."""
    import transformers  # an extra, which the other experiments do not need

    prefix, sizes = MODELS[name]
    config = getattr(transformers, f"{prefix}Config")(**(sizes | TINY if tiny else sizes))
    torch.manual_seed(60)
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float32 if tiny else torch.bfloat16)
    try:
        with torch.device(device):
            return getattr(transformers, f"{prefix}ForCausalLM")(config).eval()
    finally:
        torch.set_default_dtype(before)


def cache_of(system: str, model: Any, tokens: int, *, tiny: bool) -> Any:
    """Our cache, for so many tokens."""
    from kvtwin.optimized import hf
    from kvtwin.reference.thinkv import Thresholds

    name = system.removesuffix(CAPTURED).removesuffix(COMPILED)
    options = {key: tokens if value is None else value for key, value in CACHES[name].items()}
    if tiny and "budget" in options:
        options["budget"] = 6
    if tiny and name == "EpiKV":
        options |= {"recent": 2, "policy": "kv_key"}            # the others want more layers
    if name == "ThinKV":
        options["thresholds"] = Thresholds(layers=(0, model.config.num_hidden_layers - 1), edges=(0.3, 0.6))
    return getattr(hf, f"{name}Cache")(model if name == "EpiKV" else model.config, **options)


def one(model: Any, system: str, ids: Tensor, steps: int, *, tiny: bool) -> dict[str, Any]:
    """Generate once: the figures of a row."""
    from transformers import LogitsProcessorList

    from kvtwin.optimized.hf import captured

    device, ours = ids.device, system not in PEERS
    model.set_attn_implementation("kvtwin" if ours else "sdpa")
    given: dict[str, Any] = {"cache_implementation": "static"} if system == STATIC else {}
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
    weights = torch.cuda.memory_allocated(device) if device.type == "cuda" else 0
    if ours:
        given["past_key_values"] = cache_of(system, model, ids.shape[1] + steps, tiny=tiny)
        given["disable_compile"] = not system.endswith(COMPILED)
    within: Any = captured(model) if system.endswith(CAPTURED) else nullcontext()
    hooks: Any = given["past_key_values"] if system.startswith("EpiKV") else nullcontext()     # its hooks on the model
    with warnings.catch_warnings(), hooks, within as graphs:
        warnings.simplefilter("ignore")                         # why steps have no graph is in `reasons`
        clock = Clock(device)
        tokens = model.generate(
            input_ids=ids, attention_mask=torch.ones_like(ids), max_new_tokens=steps, do_sample=False,
            logits_processor=LogitsProcessorList([clock]), **given,
        )
        first, *others = clock.milliseconds()
        reasons = [] if graphs is None else list(graphs.reasons)
    peak = torch.cuda.max_memory_allocated(device) - weights if device.type == "cuda" else 0
    return {
        "seconds_to_first_token": first / 1000, "ms_per_token": statistics.median(others[FIRST:] or others),
        "slowest_ms": max(others[FIRST:] or others), "peak_bytes": peak, "reasons": reasons,
        "tokens": hashlib.sha256(tokens.cpu().numpy().tobytes()).hexdigest()[:12],
    }


def measure(plan: Plan, path: Path, device: torch.device, *, tiny: bool = False) -> bool:
    """Add rows to the file until everything is measured; False at the limit, before that."""
    began, built, model = time.monotonic(), "", None
    called: set[tuple[str, Shape, str]] = set()
    while (what := following(plan, stored(path))) is not None:
        if time.monotonic() - began > plan.limit:
            return False
        name, shape, system = what
        if name != built:
            model = None
            _free(device)
            built, model = name, build(name, device, tiny=tiny)
        generator = torch.Generator(device).manual_seed(60)
        ids = torch.randint(1, model.config.vocab_size, shape, device=device, generator=generator)
        row: dict[str, Any] = {"model": name, "shape": str(shape), "system": system}
        started = time.monotonic()
        try:
            if what not in called:
                first = one(model, system, ids, plan.steps, tiny=tiny)
                row["seconds_of_first_call"] = first["seconds_to_first_token"]
                _free(device)
            called.add(what)
            row |= one(model, system, ids, plan.steps, tiny=tiny)
        except Exception as error:                              # such as a cache that does not fit
            row["error"] = f"{type(error).__name__}: {str(error).partition(chr(10))[0][:200]}"
        if system.endswith(COMPILED):                           # of one function PyTorch compiles eight kinds at most
            torch._dynamo.reset()
            called.discard(what)
        _free(device)
        row["seconds"] = round(time.monotonic() - started, 1)
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")
        print("generate: " + ", ".join(f"{key} {value}" for key, value in row.items()), flush=True)
    return True


def _free(device: torch.device) -> None:
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def run(run: Run, plan: Plan | None = None) -> None:
    plan = plan or (TINY_PLAN if run.tiny else Plan())
    path = run.out / "generate.jsonl"
    if not measure(plan, path, run.device, tiny=run.tiny):
        run.complain(f"the time limit of {plan.limit:.0f} s is reached: run it again to go on")
    rows = stored(path)
    for name, systems in medians(rows).items():
        run.record(name, systems)
    for text in wrong(rows, graphs=run.cuda):
        run.complain(text)


def wrong(rows: list[dict[str, Any]], *, graphs: bool = True) -> list[str]:
    """Errors, systems whose captured steps give other tokens than eager ones, and with `graphs`, steps that have none.
    """
    found = []
    tokens = {key_of(row): row["tokens"] for row in rows if "tokens" in row}
    for (model, shape, system), digest in tokens.items():
        if tokens.get((model, shape, f"{system}{CAPTURED}"), digest) != digest:
            found.append(f"{model} {shape}: {system}: captured steps give other tokens than eager ones")
    for row in rows:
        said = f"{' '.join(key_of(row))}: "
        found += [said + row["error"]] if "error" in row else [said + one for one in row["reasons"] if graphs]
    return list(dict.fromkeys(found))


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m perf.headline.generate", description=__doc__.partition("\n")[0])
    parser.add_argument("--only", action="append", choices=SYSTEMS, metavar="SYSTEM", help="; ".join(SYSTEMS))
    parser.add_argument("--model", action="append", choices=MODELS, help="default: both")
    parser.add_argument(
        "--shapes", type=lambda text: tuple(map(shape_of, text.split(","))), default=SHAPES, metavar="ROWSxTOKENS,...",
        help=f"default: {','.join(map(str, SHAPES))}",
    )
    parser.add_argument("--limit", type=float, default=Plan().limit, metavar="SECONDS", help="begin nothing after this")
    parser.add_argument("--out", type=Path, default=Path("headline-results"), help="the folder of the results")
    parser.add_argument("--device", default="cuda")
    given = parser.parse_args(arguments)
    if given.device.startswith("cuda") and not torch.cuda.is_available():
        parser.error(f"--device={given.device}: torch {torch.__version__} finds no CUDA device")
    plan = Plan(tuple(given.model or MODELS), given.shapes, tuple(given.only or SYSTEMS), given.limit)
    found = Run("generate", given.out, given.device)
    run(found, plan)
    found.finished = True
    found.write()
    return 1 if found.complaints else 0


if __name__ == "__main__":
    sys.exit(main())
