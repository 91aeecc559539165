"""What a layer of a decode step with our caches takes the host: python -m perf.host [CACHE...], without a GPU.

The layer's cache and attention run as in a model of transformers, in Triton's interpreter, with kernels that do
nothing. The time is that of Python, PyTorch's operations on small tensors, and the arguments of launches, but not
Triton's own launch, some 10 microseconds for each kernel. Prints the median and the least microseconds per layer.

With --captured: steps of `generate` within `captured`, by a model of 36 tiny layers, whose graphs do nothing. Prints
the median microseconds per step in the model's forward method before the launch, in it after the launch, and in
`generate` between two calls of the method. A GPU works during the second and the beginning of the third. --profile adds
the functions in which the host is before the launch.
"""

from __future__ import annotations

import argparse
import cProfile
import functools
import pstats
import statistics
import sys
import time
from typing import Any
from unittest import mock

import torch
import triton

from .headline.generate import CACHES, TINY, build, cache_of

BATCH, QUERY_HEADS, HEADS, HEAD_DIM, LAYERS = 1, 8, 4, 32, 8
PROMPT, WARM, STEPS = 72, 8, 60


class Layers:
    """The caches of a model's layers, without the model."""

    def __init__(self, name: str) -> None:
        import transformers

        self.config = transformers.Qwen3Config(
            hidden_size=QUERY_HEADS * HEAD_DIM, num_hidden_layers=LAYERS, num_attention_heads=QUERY_HEADS,
            num_key_value_heads=HEADS, head_dim=HEAD_DIM, attn_implementation="kvtwin",
        )
        self.cache, self.seen = cache_of(name, self, 4096, tiny=False), 0

    def forward(self, count: int) -> float:
        """A pass of so many tokens: the seconds of all layers."""
        from transformers.masking_utils import causal_mask_function

        from kvtwin.reference.hf.cache_adapter import attention
        from kvtwin.reference.hf.masks import make_mask

        mask = make_mask(
            mask_function=causal_mask_function, attention_mask=None, batch_size=BATCH, q_length=count,
            kv_length=self.seen + count, q_offset=self.seen, kv_offset=0, device=torch.device("cpu"),
        )
        positions, seconds, module = torch.arange(self.seen, self.seen + count)[None], 0.0, torch.nn.Module()
        for layer in range(LAYERS):
            query, key, value = (
                torch.randn(BATCH, count, heads, HEAD_DIM).transpose(1, 2) for heads in (QUERY_HEADS, HEADS, HEADS)
            )
            began = time.thread_time()
            key, value = self.cache.update(key, value, layer)
            attention(module, query, key, value, mask, scaling=HEAD_DIM**-0.5, position_ids=positions)
            seconds += time.thread_time() - began
        self.seen += count
        return seconds


def microseconds(name: str, steps: int = STEPS) -> list[float]:
    """Of one layer in each of `steps` decode steps."""
    from triton.runtime.interpreter import InterpretedFunction

    nothing: Any = mock.patch.object(InterpretedFunction, "run", return_value=None)
    with torch.no_grad(), nothing:
        layers = Layers(name)
        for count in (PROMPT, *([1] * WARM)):
            layers.forward(count)
        return [layers.forward(1) / LAYERS * 1e6 for _ in range(steps)]


def captured_steps(
    name: str, layers: int = 36, steps: int = 400, profile: cProfile.Profile | None = None
) -> list[tuple[float, float, float]]:
    """Microseconds of each replay: before its launch, from there to the end of the forward method, and until the next.
    """
    from triton.runtime.interpreter import InterpretedFunction

    from kvtwin.optimized._common import graph
    from kvtwin.optimized.hf import _captured

    times: list[float] = []

    def note() -> None:
        times.append(time.perf_counter() * 1e6)

    def launch() -> None:
        if profile is not None:
            profile.disable()
        note()

    def forward(*args: Any, **kwargs: Any) -> Any:
        before = len(times)
        note()
        if profile is not None and before >= 3 * WARM:
            profile.enable()
        output = inner(*args, **kwargs)
        launch()                                                # of nothing: this is the end
        if len(times) < before + 3:                             # a pass without a graph
            del times[before:]
        return output

    cpu = torch.device("cpu")
    with mock.patch.dict(TINY, num_hidden_layers=layers, head_dim=HEAD_DIM):
        model = build("Qwen3-8B", cpu, tiny=True)
    model.set_attn_implementation("kvtwin")
    cache, ids = cache_of(name, model, PROMPT + steps, tiny=False), torch.ones(1, PROMPT, dtype=torch.int64)
    patch: Any = mock.patch.object
    with patch(InterpretedFunction, "run", return_value=None), patch(_captured, "DEVICES", ("cpu",)), \
            patch(graph, "captured", lambda function, pool: function() or launch), _captured.captured(model) as found:
        inner = model.forward
        model.forward = functools.wraps(inner)(forward)
        options = {"attention_mask": torch.ones_like(ids), "past_key_values": cache, "max_new_tokens": steps}
        model.generate(ids, do_sample=False, **options)
    assert not found.reasons, found.reasons
    starts, launches, ends = times[::3], times[1::3], times[2::3]
    return [(b - a, c - b, d - c) for a, b, c, d in zip(starts, launches, ends, starts[1:], strict=False)][WARM:]


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m perf.host", description=__doc__.partition(":")[0])
    parser.add_argument("caches", nargs="*", metavar="CACHE", help=f"default: all of {', '.join(sorted(CACHES))}")
    parser.add_argument("--captured", action="store_true", help="the host's part of a replay, in generate")
    parser.add_argument("--profile", action="store_true", help="and the functions in which the host is before it")
    given = parser.parse_args(arguments)
    known = sorted(CACHES if given.captured else CACHES.keys() - {"EpiKV"})     # which has hooks in a model
    unknown = sorted(set(given.caches) - set(known))
    if unknown:
        parser.error(f"unknown: {', '.join(unknown)}; known: {', '.join(known)}")
    if not triton.knobs.runtime.interpret:
        parser.error("set TRITON_INTERPRET=1: kernels must not need a GPU here")
    torch.set_num_threads(1)
    for name in given.caches or known:
        if given.captured:
            profile = cProfile.Profile() if given.profile else None
            of_steps = zip(*captured_steps(name, profile=profile), strict=True)
            print(f"{name:14}", *(f"{statistics.median(one):7.1f}" for one in of_steps), flush=True)
            if profile is not None:
                pstats.Stats(profile).sort_stats("tottime").print_stats(24)
            continue
        found = microseconds(name)
        print(f"{name:14} {statistics.median(found):7.1f} {min(found):7.1f}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
