"""The page on performance and its plot: how fast each method is, beside what, on which GPU.

Every figure is from a stored run: perf/baselines, and the headline experiments in them. The page is in the repository,
for readers who do not build the documentation; each build writes it again.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from .markdown import markdown_table
from .results import bars
from .stored import DOCS, baselines

PAGE, PLOT = "explanation/performance.md", "explanation/performance.svg"

#: What a benchmark times, if it is a step of the usual shape.
STEP = "a step, 128 rows of 3,200 tokens"


class Decode(NamedTuple):
    """Which benchmark stands for a method's decoding, and what it times."""

    benchmark: str
    timed: str


#: Methods whose benchmark is not `test_step[METHOD-B128-Hq32-S3200]`.
DECODING = {
    "longflow": Decode("test_step[B128-Hq32-S3200]", STEP),
    "cake": Decode("test_step[B128-n3200]", STEP),
    "keydiff": Decode("test_step[B128-S3200]", STEP),
    "epikv": Decode("test_step[B64-S4096]", "a step, 64 rows of 4,096 tokens"),
    "snapkv": Decode("test_interval[B128-Hq32-S3200]", "128 steps and an eviction, 128 rows of 3,200 tokens"),
    "kivi": Decode("test_interval[4-B64-Hq32-S8192]", "128 steps at 4 bits, 64 rows of 8,192 tokens"),
    "pm_kvq": Decode("test_interval[4-B64-Hq32-S8192]", "128 steps at 4 bits, 64 rows of 8,192 tokens"),
    "quest": Decode("test_step[independent]", "a step, 8 rows of 128K tokens, 2,048 of them selected"),
    "synckv": Decode("test_stride", "5 steps, 8 rows of 128K tokens, 30 % resident"),
    "thinkv": Decode("test_steady_state", "a step, 256 rows of 4,096 quantized tokens"),
}
#: Prompts: the benchmark's name ends with one of these.
PROMPTS = {"16K tokens": "B1-Hq32-Q16384-S2048]", "8 x 4K tokens": "B8-Hq32-Q4096-S2048]",
           "64K tokens": "B1-Hq32-Q65536-S2048]"}  # fmt: skip
#: The headline experiments that time a method's decode loop in tokens per second, and their models.
MODELS = {"longflow": "Qwen3-1.7B's shape, 16,000 tokens", "thinkv": "Llama-8B's shape, 32,768 tokens"}


def page() -> str:
    runs = dict(baselines())
    machines = [run["machine_info"] for run in runs.values()]
    versions = "; ".join(f"{one['gpu']}: torch {one['torch']}, triton {one['triton']}" for one in machines)
    gpus = [run["machine_info"]["gpu"] for run in runs.values()]
    return (
        "# Performance\n\n"
        "Times of the optimized methods from stored runs of `perf/`, each beside PyTorch's fastest attention kernel in "
        f"the same run. This page is generated. {versions}.\n\n"
        "## Decoding\n\n"
        "The steps of one layer: 32 query heads on 8 KV heads of 128 channels, bfloat16. The peer attends to as many "
        "tokens in bfloat16 and does nothing else. A method that evicts reads as many tokens as the peer, so 1 is the "
        "best that it can reach here: it gains by the tokens that it no longer has. A method that quantizes, selects "
        "or offloads reads less than the peer.\n\n"
        f"![Time of a method over the peer's, by method and GPU]({Path(PLOT).name})\n\n"
        f"{markdown_table(['method', 'timed', *gpus, 'target'], decoding(runs))}\n\n"
        "Milliseconds, then the multiple of the peer's time; `-`: not stored, or no peer. The target is a multiple of "
        "cuDNN's time.\n\n"
        "## Prompts\n\n"
        "Milliseconds of `prefill` with a budget of 2,048 tokens, and the multiple of cuDNN's causal attention alone, "
        f"on an {_of_prompts(runs)['machine_info']['gpu']}. A whole prompt's attention is the peer's kernel: less than "
        "1 is the spread of its time, no gain. In blocks of 128 tokens, a method evicts on the way and attends to "
        "fewer tokens than the peer.\n\n"
        f"{markdown_table(['method', *PROMPTS], prompts(runs))}\n\n"
        f"## Whole models\n\n{whole_models(runs)}\n"
        "## How it is measured\n\n"
        "`python -m tox -e perf` captures decode steps in CUDA graphs, flushes the L2 cache before each round, "
        "alternates with the peers, and takes medians of device time. Then it compares the buffers that it timed with "
        "float64. Launches by the host are not part of these times; [transformers](../how-to/transformers.md) says how "
        "to capture the steps of a model. GPUs of one kind differ by several percent, so compare ratios, not times."
        "\n\n"
        "[Benchmarks](../reference/results/benchmarks.md) has every stored figure and target, [the headline "
        "experiments](../reference/results/headline.md) compare with the papers' figures, and `perf/NOTES.md` says "
        "what limits each kernel.\n"
    )


def benchmarks(run: Any) -> dict[tuple[str, str], Any]:
    """The stored benchmarks with times, by group and name."""
    return {(one["group"], one["name"]): one["extra_info"] for one in run["benchmarks"]
            if "milliseconds" in one["extra_info"]}  # fmt: skip


def decode_of(method: str) -> Decode:
    return DECODING.get(method, Decode(f"test_step[{method}-B128-Hq32-S3200]", STEP))


def stored_decoding(run: Any) -> dict[str, Any]:
    """The benchmark that stands for each method's decoding, as far as this run has it."""
    found = benchmarks(run)
    methods = dict.fromkeys(group for group, _ in found if group)
    chosen = {method: (method, decode_of(method).benchmark) for method in methods}
    return {method: found[key] for method, key in chosen.items() if key in found}


def decoding(runs: Mapping[str, Any]) -> Iterable[list[str]]:
    """A row per method: what is timed, the time on each GPU, and the target."""
    stored = [stored_decoding(run) for run in runs.values()]
    targets = {(method, key): asked["ratio.cudnn"] for (method, key), asked in bars().items() if "ratio.cudnn" in asked}
    for method in sorted({method for found in stored for method in found}):
        decode = decode_of(method)
        key = decode.benchmark.removeprefix("test_").replace(f"[{method}-", "[")
        target = targets.get((method, key))
        yield [
            method, decode.timed, *(_time(found.get(method)) for found in stored), f"{target:.2f}" if target else "-",
        ]


def _ratio(info: Any) -> float | None:
    return None if info["strongest"] is None else info["peers"][info["strongest"]]["ratio"]


def _time(info: Any) -> str:
    if info is None:
        return "-"
    ratio = _ratio(info)
    return f"{_number(info['milliseconds'])} ({'-' if ratio is None else _number(ratio)})"


def _number(value: float) -> str:
    """Three significant digits."""
    return f"{value:#.3g}".removesuffix(".")


def _of_prompts(runs: Mapping[str, Any]) -> Any:
    """The run with the most stored prompts."""
    return max(runs.values(), key=lambda run: sum("prompt" in name for _, name in benchmarks(run)))


def prompts(runs: Mapping[str, Any]) -> Iterable[list[str]]:
    """A row per method, those that take a prompt whole first."""
    found = {name: info for (_, name), info in benchmarks(_of_prompts(runs)).items()}
    for how, words in (("test_whole_prompt", "whole"), ("test_prompt_in_blocks", "in blocks")):
        methods = sorted({name.partition("[")[2].partition("-")[0] for name in found if name.startswith(how)})
        for method in methods:
            times = (_time(found.get(f"{how}[{method}-{shape}")) for shape in PROMPTS.values())
            yield [f"{method}, {words}", *times]


def whole_models(runs: Mapping[str, Any]) -> str:
    """Decode loops of models of the true shape, from the headline experiments."""
    rows = []
    for run in runs.values():
        experiments = run.get("headline", {}).get("experiments", {})
        figures = {name: one["figures"] for name, one in experiments.items()}
        for method, model in MODELS.items():
            found = figures.get(method, {})
            if method in found and "full KV" in found:
                ours, full = found[method], found["full KV"]
                rows.append([
                    method, run["machine_info"]["gpu"], model,
                    *(f"{one['tokens_per_second']:,.0f} tokens/s, {one['batch']} rows" for one in (ours, full)),
                    _number(ours["tokens_per_second"] / full["tokens_per_second"]),
                ])
        synckv = figures.get("synckv", {}).get("B1-128K")
        if synckv:
            ours, full = synckv["synckv, ms a step"], synckv["full attention, ms a step"]
            times = (f"{_number(one)} ms a step" for one in (ours, full))
            model = "Llama-8B's shape, 1 row of 128K tokens"
            rows.append(["synckv", run["machine_info"]["gpu"], model, *times, _number(full / ours)])
    head = ["method", "GPU", "model", "with the method", "with full attention", "times as fast"]
    return (
        "Decode loops with random weights in bfloat16 in CUDA graphs; figures in rows are of the largest batch that "
        f"fits. Full attention is cuDNN's or flash attention over all tokens.\n\n{markdown_table(head, rows)}\n"
    )


def plot() -> str:
    """A row per method, a mark per GPU: time over the peer's, logarithmic."""
    from kvtwin.fixtures import plotting

    ratios = {run["machine_info"]["gpu"]: _ratios(run) for _, run in baselines()}
    methods = sorted({method for found in ratios.values() for method in found}, reverse=True)
    ticks = (0.125, 0.25, 0.5, 1, 2, 4, 8, 16, 32, 64)

    def draw(figure: Any) -> None:
        (axes,) = plotting.panels(figure, 1, left=110, top=40, bottom=44)
        axes.set_xscale("log", base=2)
        axes.minorticks_off()
        axes.set(ylim=(-0.6, len(methods) - 0.4), xlim=(0.1, 90), xlabel="time over the peer's")
        axes.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
        axes.set_yticks(range(len(methods)), methods)
        axes.grid(axis="x")
        axes.axvline(1, color=plotting.TEXT, linewidth=1)
        for (gpu, found), mark, colour in zip(ratios.items(), "so^D", plotting.COLOURS, strict=False):
            at = [methods.index(method) for method in found]
            axes.plot(list(found.values()), at, linestyle="", marker=mark, color=colour, alpha=0.8, label=gpu)
        axes.legend(loc="lower right", bbox_to_anchor=(1, 1), ncols=len(ratios), borderaxespad=0)

    return plotting.svg("Time of a method over the peer's, by method and GPU", (640, 84 + 22 * len(methods)), draw)


def _ratios(run: Any) -> dict[str, float]:
    found = {method: _ratio(info) for method, info in stored_decoding(run).items()}
    return {method: ratio for method, ratio in found.items() if ratio is not None}


def write() -> None:
    """Write the page and its plot, if they changed."""
    for path, text in ((PAGE, page()), (PLOT, plot())):
        if not (DOCS / path).is_file() or (DOCS / path).read_text(encoding="utf-8") != text:
            (DOCS / path).write_text(text, encoding="utf-8")
