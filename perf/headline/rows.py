"""A table of the papers' headline figures: the paper's figure, the measured figure, and the differences in setup."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from .generate import CAPTURED, PEERS
from .plots import number

COLUMNS = ("paper", "its figure", "here", "what differs")

Figures = Mapping[str, Any]


def rows(result: Figures) -> list[list[str]]:
    """A row for each figure of the experiments in `result`. A missing part gives "not measured"."""
    found = []
    for experiment, paper, says, here, differs in _ROWS:
        if experiment not in result["experiments"]:
            continue
        try:
            text = here(result["experiments"][experiment]["figures"])
        except KeyError as missing:
            text = f"not measured ({missing.args[0]} is missing)"
        found.append([paper, says, text, differs])
    return found


def _times(ratio: float) -> str:
    return f"{number(ratio)} times"


def _throughput(figures: Figures, ours: str, peers: Mapping[str, str]) -> str:
    """The ratios to these peers, measured and predicted from the bytes; then batch sizes and rates."""
    said = [
        f"{_times(figures['ratios'][peer]['measured'])} {name} (by bytes {number(figures['ratios'][peer]['by_bytes'])})"
        for peer, name in peers.items()
    ]
    rates = [
        f"{name} {one['batch']} rows, {number(one['tokens_per_second'])} tokens/s"
        for name, one in ((ours, figures[ours]), *((name, figures[peer]) for peer, name in peers.items()))
    ]
    return f"{', '.join(said)}: {'; '.join(rates)}"


def _longflow_full(figures: Figures) -> str:
    share = figures["full KV"]["share_of_bytes_bound"]
    return f"{_throughput(figures, 'longflow', {'full KV': 'full KV'})}, {share:.0%} of its byte bound"


def _longflow_others(figures: Figures) -> str:
    names = {
        "h2o": "H2O", "snapkv": "SnapKV", "snapkv fused": "SnapKV (ours)", "r-kv fused": "R-KV (ours)",
        "h2o fused, at intervals": "H2O (ours)", "vatp fused, at intervals": "VATP (ours)",
        "h2o fused": "H2O (ours, every step)",
    }
    return _throughput(figures, "longflow", {name: said for name, said in names.items() if name in figures})


def _module(figures: Figures) -> str:
    found = figures["attention module"]
    ours = found["longflow"]["milliseconds_all_layers"]
    said = [
        f"{name} {number(one['milliseconds_all_layers'])} ms" for name, one in found.items() if name != "longflow"
    ]
    return f"{number(ours)} ms over 36 layers; {', '.join(said)}"


def _thinkv(figures: Figures) -> str:
    names = {"gather, sequential": "sequential gather", "gather, overlapped": "overlapped gather",
             "r-kv fused": "R-KV every 128 steps (ours)", "kivi": "KIVI, 2 bits (ours)",
             "pm-kvq": "PM-KVQ, 4 bits (ours)", "full KV": "full KV"}
    return _throughput(figures, "thinkv", {name: said for name, said in names.items() if name in figures})


def _thinkv_iso(figures: Figures) -> str:
    found = {name: one["tokens_per_second"] for name, one in figures.items() if name.endswith("at batch 256")}
    said = "; ".join(f"{name.removesuffix(' at batch 256')} {number(rate)} tokens/s" for name, rate in found.items())
    return said or "not measured"


def _synckv(key: str) -> Callable[[Figures], str]:
    def said(figures: Figures) -> str:
        found = []
        for name, one in figures.items():
            if f"{key}, times as fast" not in one:
                continue
            text = f"{_times(one[f'{key}, times as fast'])} at {name.replace('-', ', ')}"
            if one["full attention, share of bytes bound"] is not None:
                text += (
                    f" ({number(one[f'{key}, ms a step'])} against {number(one['full attention, ms a step'])} ms, by "
                    f"bytes {number(one['by bytes'])}, full attention at "
                    f"{one['full attention, share of bytes bound']:.0%} of its byte bound)"
                )
            found.append(text)
        return "; ".join(found) or "not measured"

    return said


def _selecting(method: str) -> Callable[[Figures], str]:
    """Times over full attention of a method that SyncKV's tables compare with."""
    def said(figures: Figures) -> str:
        found = [
            f"{_times(one[f'{method}, times as fast'])} at {name.replace('-', ', ')} "
            f"({number(one[f'{method}, ms a step'])} ms)"
            for name, one in figures.items() if f"{method}, times as fast" in one
        ]
        return "; ".join(found) or "not measured"

    return said


def _cake(figures: Figures) -> str:
    shares = {percent: _selecting(f"cake {percent} %")(figures) for percent in (20, 30, 50)}
    found = [f"{percent} %: {said}" for percent, said in shares.items() if said != "not measured"]
    return "; ".join(found) or "not measured"


def _prompt(figures: Figures) -> str:
    found = []
    for name, one in figures.items():
        if name.startswith("prompt"):
            parts = [
                f"{what} {one[f'{what}, over attention alone']:.3f} times its attention alone, "
                f"{one[f'{what}, over the fastest attention']:.2f} times the fastest kernel's"
                for what in ("synckv", "offloaded") if f"{what}, over attention alone" in one
            ]
            found.append(f"{name}: {'; '.join(parts)}")
    return "; ".join(found) or "not measured"


def _context(figures: Figures) -> str:
    found = {name: one["longest"] for name, one in figures["context"].items()}
    ratios = figures["context ratios"]
    ended = None in figures["context"]["hidden states"]["tried"].values()
    return (
        f"{'' if ended else 'at least '}{_times(ratios['hidden states over weights kept'])}: "
        f"{found['hidden states']:,} tokens{'' if ended else ' (the largest tested)'} against "
        f"{found['attention weights kept']:,}; a layer at a time {found['attention weights, a layer at a time']:,}"
    )


def _epikv_steps(figures: Figures) -> str:
    found = figures["steps"]
    peers = [f"{name} {number(one['over_ours'])}" for name, one in found.items() if name != "epikv"]
    return f"{number(found['epikv']['milliseconds'])} ms a step; multiples of it: {', '.join(peers)}"


def _eviction(figures: Figures) -> str:
    found = figures["eviction"]
    return (
        f"{number(found['microseconds'])} us + {number(found['nanoseconds_per_token'])} ns a token of 8 heads, "
        f"at most {found['farthest_from_the_line']:.0%} off this line"
    )


def _first_token(figures: Figures) -> str:
    return "; ".join(
        f"{name} {number(one['seconds_to_first_token'])} s" for name, one in figures.items()
        if "seconds_to_first_token" in one
    )


def _memory(figures: Figures) -> str:
    return "; ".join(
        f"{name} {one['peak_bytes'] / 2**30:.2f} GiB, {one['fragmentation']:.0%}" for name, one in _ordered(figures)
    )


def _generate(figures: Figures) -> str:
    """Peers, and our caches with `captured`. The plots have the others."""
    return "; ".join(
        f"{setting}: " + ", ".join(
            f"{system} {number(one['ms_per_token'])} ms" for system, one in systems.items()
            if "ms_per_token" in one and (system in PEERS or system.endswith(CAPTURED))
        ) for setting, systems in figures.items()
    )


def _ordered(figures: Figures) -> Iterator[tuple[str, Any]]:
    yield from sorted(figures.items(), key=lambda item: item[1]["peak_bytes"])


_GRAPHS = "all decode loops in CUDA graphs, also the peers'; the paper used an A100 40 GB and transformers"
_ROWS: tuple[tuple[str, str, str, Callable[[Figures], str], str], ...] = (
    (
        "longflow", "LongFlow, figure 4: Qwen3-1.7B, 512 in, 16,000 out, budget 3200, largest batch",
        "11.8 times full KV", _longflow_full,
        f"{_GRAPHS}; in brackets: the ratio predicted from the bytes that a step reads",
    ),
    (
        "longflow", "the same against methods that evict every 128 steps", "about 4.0 times", _longflow_others,
        "the peers attend with cuDNN and close gaps with one gather of whole rows; `(ours)` marks this library's "
        "states, which move few or no tokens",
    ),
    (
        "longflow", "LongFlow, figure 1: attention module, Qwen3-8B, batch 128, 3200 tokens",
        "47 ms to 8 ms, H2O to LongFlow", _module, "a layer's time with a cold L2, times 36",
    ),
    (
        "thinkv", "ThinKV, table 2: Llama-8B to 32,768 tokens, budget 1024, largest batch",
        "5.8 times R-KV with sequential gather (A100), 4.4 on a GH200; 23 times full KV", _thinkv,
        "our pools are reserved for the worst case of every type of thought, so that fewer rows fit; the peers that "
        "gather at every step are timed without choosing tokens; R-KV evicts every 128 steps",
    ),
    (
        "thinkv", "the same at batch 256", "8080 tokens/s, R-KV 2490 and 5319 (GH200, no quantization)", _thinkv_iso,
        "ours is quantized",
    ),
    (
        "epikv", "EpiKV, figure 1: feasible context", "16 times: 65,536 against less than 8192 tokens (A100 80 GB)",
        _context, "memory of all layers is allocated, but only one layer runs; the MLP processes the prompt in parts",
    ),
    (
        "epikv", "EpiKV, section 4.4: time at equal budget, 8192", "2.8 times RaaS, 1.6 times ThinKV", _epikv_steps,
        "steps in CUDA graphs at batch 1, where reading the weights dominates; the paper launches kernel by kernel",
    ),
    (
        "keydiff", "KeyDiff, A.2: eviction linear in tokens", "O(N + B), no times", _eviction,
        "2K to 1M tokens, batch 1",
    ),
    (
        "keydiff", "KeyDiff: first token after 131,072 in blocks of 128, budget 8192", "no times", _first_token,
        "all states are this library's",
    ),
    (
        "synckv", "SyncKV, figure 5: steps without offload, 128K", "3 times full attention", _synckv("synckv"),
        "weights in bfloat16 instead of 4 bits, and reading them dominates a step at batch 1; the peer is cuDNN in a "
        "graph",
    ),
    ("synckv", "the same with offload", "1.25 times", _synckv("offloaded"), "as above"),
    (
        "synckv", "the same with Quest", "SyncKV is faster, no times", _selecting("quest"),
        "all layers select 2048 tokens per query head, in pages of 16; the authors' first two layers attend to all",
    ),
    (
        "synckv", "the same with CAKE, 20, 30 and 50 % of the tokens", "accuracy only, no times", _cake,
        "all layers have equal budgets; a cascade divides the same total otherwise",
    ),
    (
        "synckv", "SyncKV, table 3: prefill time over full attention's", "2.45 s against 2.19 s, 1.12 times", _prompt,
        "one layer's prefill over its attention",
    ),
    (
        "memory", "LongFlow, figure 4: peak and fragmentation", "less fragmented than others, no figures in the text",
        _memory, "caches without a model, budget 1024, batch 16, no CUDA graphs",
    ),
    (
        "generate", "transformers' generate, time per token", "no paper's figure", _generate,
        "models of 8 billion parameters; budget 2048; `captured` replays decode steps as CUDA graphs",
    ),
)
