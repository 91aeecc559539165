"""The papers' headline figures, one row each: what the paper says, what was measured here, what differs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from .plots import number

COLUMNS = ("paper", "its figure", "here", "what differs")

Figures = Mapping[str, Any]


def rows(result: Figures) -> list[list[str]]:
    """A row for each figure of an experiment that was run; one whose part is missing says so."""
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
    """Ratios to these peers, each with what bytes alone give; then batches and rates."""
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
        "h2o": "H2O", "snapkv": "SnapKV", "r-kv": "R-KV", "snapkv fused": "SnapKV (ours)",
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
             "r-kv": "R-KV every 128 steps", "full KV": "full KV"}
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
        f"{found['hidden states']:,} tokens{'' if ended else ', the most that was tried,'} against "
        f"{found['attention weights kept']:,}; a layer at a time {found['attention weights, a layer at a time']:,}"
    )


def _epikv_steps(figures: Figures) -> str:
    found = figures["steps"]
    peers = [f"{name} {number(one['over_ours'])}" for name, one in found.items() if name != "epikv"]
    return f"{number(found['epikv']['milliseconds'])} ms a step; times that: {', '.join(peers)}"


def _eviction(figures: Figures) -> str:
    found = figures["eviction"]
    return (
        f"{number(found['microseconds'])} us + {number(found['nanoseconds_per_token'])} ns a token of 8 heads, "
        f"{found['farthest_from_the_line']:.0%} off the line at most"
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


def _ordered(figures: Figures) -> Iterator[tuple[str, Any]]:
    yield from sorted(figures.items(), key=lambda item: item[1]["peak_bytes"])


_GRAPHS = "decode loops in CUDA graphs, peers' too; an A100 40 GB and transformers in the paper"
_ROWS: tuple[tuple[str, str, str, Callable[[Figures], str], str], ...] = (
    (
        "longflow", "LongFlow, figure 4: Qwen3-1.7B, 512 in, 16,000 out, budget 3200, largest batch",
        "11.8 times full KV", _longflow_full,
        f"{_GRAPHS}; bytes alone allow the ratio in brackets, full KV being at its own limit",
    ),
    (
        "longflow", "the same against others, which evict every 128 steps", "about 4.0 times", _longflow_others,
        "their attention is cuDNN's, and gaps are closed by one gather of whole rows; beside them the states of this "
        "library, which move little or nothing",
    ),
    (
        "longflow", "LongFlow, figure 1: attention module, Qwen3-8B, batch 128, 3200 tokens",
        "47 ms to 8 ms, H2O to LongFlow", _module, "a layer's time with a cold L2, times 36",
    ),
    (
        "thinkv", "ThinKV, table 2: Llama-8B to 32,768 tokens, budget 1024, largest batch",
        "5.8 times R-KV with sequential gather (A100), 4.4 on a GH200; 23 times full KV", _thinkv,
        "our pools are reserved for the worst case of every type of thought, which costs batch; peers that gather pay "
        "for moving alone, not for choosing, or cut every 128 steps",
    ),
    (
        "thinkv", "the same at batch 256", "8080 tokens/s, R-KV 2490 and 5319 (GH200, no quantization)", _thinkv_iso,
        "ours is quantized: there is no format of 16 bits here",
    ),
    (
        "epikv", "EpiKV, figure 1: feasible context", "16 times: 65,536 against less than 8192 tokens (A100 80 GB)",
        _context, "memory of all layers, one layer run; the MLP takes a prompt in pieces",
    ),
    (
        "epikv", "EpiKV, section 4.4: time at equal budget, 8192", "2.8 times RaaS, 1.6 times ThinKV", _epikv_steps,
        "steps in CUDA graphs at batch 1, where reading the weights is most of the time; the paper's are launched one "
        "by one",
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
        "weights in bfloat16 instead of 4 bits, which are most of a step at batch 1; cuDNN in a graph as the peer",
    ),
    ("synckv", "the same with offload", "1.25 times", _synckv("offloaded"), "as above"),
    (
        "synckv", "SyncKV, table 3: what it adds to a prompt", "2.45 s against 2.19 s, 1.12 times", _prompt,
        "one layer's prefill over its attention",
    ),
    (
        "memory", "LongFlow, figure 4: peak and fragmentation", "less fragmented than others, no figures in the text",
        _memory, "caches alone, budget 1024, batch 16, nothing captured",
    ),
)
