"""KeyDiff's headline: eviction time for 2K to 1M tokens, and the time to the first token for 131,072 prompt tokens.

The paper claims O(N + B) and gives no times. Eviction: eight heads of 128 channels, one quarter of the tokens is kept,
against the same in PyTorch (normalize, mean, cosine_similarity, topk, gather). First token: a Llama-3.1-8B shape, batch
1, budget 8192, blocks of 128. A CUDA graph runs one block through all layers and is replayed for each block. The states
of KeyDiff, H2O, TOVA, SnapKV and StreamingLLM are kvtwin's, so they share their attention. For comparison, one layer is
timed with PyTorch's fastest attention over the whole prompt, which needs memory for all keys and values.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from kvtwin.conformance.judge import checkers
from kvtwin.optimized import keydiff

from .. import bench_keydiff
from ..peers import BACKENDS, causal_peers
from . import systems
from .base import Run
from .decoder import LLAMA_8B, Decoder, Model, small

BLOCK = 128
METHODS = ("keydiff", "h2o", "tova", "snapkv", "streaming_llm")


def run(run: Run) -> None:
    model = small(LLAMA_8B) if run.tiny else LLAMA_8B
    tokens, budget = (48, 16) if run.tiny else (131_072, 8192)
    with run.part("eviction"):
        eviction(run)
    decoder = Decoder(model, run, tokens)
    for method in METHODS[:1] if run.tiny else METHODS:
        if run.late(method):
            break
        with run.part(method):
            first_token(run, decoder, method, tokens, budget)
    with run.part("one piece"):
        one_piece(run, decoder, tokens)


def eviction(run: Run) -> None:
    """Milliseconds by number of tokens, and a line fitted with weights 1 / tokens: cost of the launches, cost per
    token."""
    heads, head_dim = (1, 16) if run.tiny else (bench_keydiff.HEADS, bench_keydiff.HEAD_DIM)
    sizes = [32, 64] if run.tiny else bench_keydiff.SIZES
    taken: dict[int, float] = {}
    eager: dict[int, float] = {}
    for slots in sizes:
        key, value = (run.draw(1, heads, slots, head_dim) for _ in range(2))
        budget = slots // 4
        moves = 2.0 * key.nbytes + 4 * key.nbytes / 4
        taken[slots] = 1e3 * run.seconds(
            lambda key=key, value=value, budget=budget: keydiff.evict(key, value, budget), what=f"eviction of {slots}",
            moves=moves, cold=True, rounds=15,
            check=lambda result, key=key, value=value, budget=budget: bench_keydiff.check_evicted(
                key, value, keydiff.EvictResult(*result), budget, heads=() if key.shape[2] > 2**17 else (0,)
            ),
        )
        eager[slots] = 1e3 * run.seconds(
            lambda key=key, value=value, budget=budget: bench_keydiff.eager(key, value, budget),
            what=f"eager eviction of {slots}", cold=True, rounds=5,
        )
        run.record("eviction", {"milliseconds": taken, "eager": eager})
    slope, intercept = bench_keydiff.weighted_line(sizes, list(taken.values()), [1 / slots for slots in sizes])
    most = max(abs(taken[slots] / (intercept + slope * slots) - 1) for slots in sizes)
    run.record("eviction", {
        "microseconds": 1e3 * intercept, "nanoseconds_per_token": 1e6 * slope, "farthest_from_the_line": most,
    })


def first_token(run: Run, decoder: Decoder, method: str, tokens: int, budget: int) -> None:
    """The time to the first token: all blocks of the prompt, one after the other."""
    model: Model = decoder.model
    block = 16 if run.tiny else BLOCK
    pair = checkers.pair(method)
    assert pair.config is not None and pair.state is not None
    config = pair.config(budget, block)
    kind: Any = getattr(pair.optimized, pair.state.__name__)
    states = [kind(config, **systems.sizes_of(model, 1, run)) for _ in range(model.layers)]
    generator = torch.Generator(run.device).manual_seed(61)
    prompt = torch.randint(model.vocabulary, (tokens // block, block), device=run.device, generator=generator)
    number = torch.zeros(1, dtype=torch.int64, device=run.device)
    within = torch.arange(block, device=run.device)

    def attend(layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return states[layer].append_block(query, key, value)

    def one_block() -> Tensor:
        found, _ = decoder.forward(prompt[number], number * block + within, attend)
        number.add_(1)
        return found

    def reset() -> None:
        number.zero_()
        for state in states:
            state.reset()

    captured = True
    try:
        program = run.gpu.capture(one_block)
    except RuntimeError as error:
        if isinstance(error, torch.cuda.OutOfMemoryError):
            raise
        captured = False
    if not captured:                                                   # launch without a graph
        from ..device import Direct

        program = Direct(one_block)
    reset()
    start = run.gpu.now()
    for _ in range(tokens // block):
        program.run()
    seconds = run.gpu.now() - start
    if not bool(program.result.ge(0).all()) or not bool(states[-1].key[:, :, :budget].isfinite().all()):
        run.complain(f"{method}: no first token, or keys that are not finite")
    if states[-1].tokens_seen != tokens or int(states[-1].occupied.sum(-1).max()) != budget:
        run.complain(f"{method}: the state has not seen all {tokens} tokens, or does not hold {budget} of them")
    # Per block: the weights, and the keys and values of the budget.
    moves = tokens / block * (model.weight_bytes + 0.9 * budget * model.token_bytes)
    run.possible(method, seconds, moves)
    ours = run.figures.get("keydiff", {}).get("seconds_to_first_token", seconds)
    run.record(method, {
        "seconds_to_first_token": seconds, "captured": captured, "over_keydiff": seconds / ours,
        "peak_bytes": torch.cuda.max_memory_allocated() if run.cuda else 0,
    })


def one_piece(run: Run, decoder: Decoder, tokens: int) -> None:
    """The time of one layer for the whole prompt at once, with the fastest kernel, times the number of layers."""
    model = decoder.model
    alone = Decoder(model, run, tokens, layers=1)
    ids = torch.arange(tokens, device=run.device)[None] % model.vocabulary
    positions = torch.arange(tokens, device=run.device)

    def timed(kernel: str) -> float:
        def attend(_: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
            with sdpa_kernel(BACKENDS[kernel]):
                return scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)

        seconds = run.seconds(
            lambda: alone.forward(ids, positions, attend, tile=16_384)[0], what=f"one piece, {kernel}", capture=False,
            rounds=3,
        )
        return seconds * model.layers

    # Those that this machine has.
    kernels = causal_peers(*(run.draw(1, heads, 16, model.head_dim) for heads in (
        model.query_heads, model.key_value_heads, model.key_value_heads
    )))
    seconds = {kernel: timed(kernel) for kernel in kernels}
    fastest = min(seconds, key=seconds.__getitem__)
    run.record("one piece", {
        "seconds_to_first_token": seconds[fastest], "kernel": fastest, "layers_measured": 1, "by kernel": seconds,
    })
