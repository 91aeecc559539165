"""What a layer of a decode step with our caches takes the host: python -m perf.host [CACHE...], without a GPU.

The layer's cache and attention run as in a model of transformers, in Triton's interpreter, with kernels that do
nothing. The time is that of Python, PyTorch's operations on small tensors, and the arguments of launches, but not
Triton's own launch, some 10 microseconds for each kernel. Prints the median and the least microseconds per layer.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from typing import Any
from unittest import mock

import torch
import triton

from .headline.generate import CACHES, cache_of

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


def main(arguments: list[str] | None = None) -> int:
    known = sorted(CACHES.keys() - {"EpiKV"})                   # which has hooks in a model
    parser = argparse.ArgumentParser(prog="python -m perf.host", description=__doc__.partition(":")[0])
    parser.add_argument("caches", nargs="*", metavar="CACHE", help=f"default: all of {', '.join(known)}")
    given = parser.parse_args(arguments)
    unknown = sorted(set(given.caches) - set(known))
    if unknown:
        parser.error(f"unknown: {', '.join(unknown)}; known: {', '.join(known)}")
    if not triton.knobs.runtime.interpret:
        parser.error("set TRITON_INTERPRET=1: kernels must not need a GPU here")
    torch.set_num_threads(1)
    for name in given.caches or known:
        found = microseconds(name)
        print(f"{name:14} {statistics.median(found):7.1f} {min(found):7.1f}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
