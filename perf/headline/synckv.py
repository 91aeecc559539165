"""SyncKV's headline: steps at 16K to 128K tokens, with and without offload, against full attention; prefill time.

The paper (A100, Llama-3.1-8B with weights in 4 bits, batch 1): 1.25 times as fast as full attention at 128K with
offload, 3 times without. Here weights are in bfloat16, so that every step also reads 16 GB of weights.

30 % of the keys and values are resident (k is a fifteenth of all tokens). Queries are given. They rotate between
anticipations such that about 0.8 of the chosen tokens stay the same. States get their prompt by `prefill`, without its
attention. Times are of cycles of two strides through all layers. Steps with offload run in a graph if they can be
captured.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, ClassVar

import torch
from torch import Tensor

from kvtwin.optimized import synckv
from kvtwin.optimized._common.prompt_attention import causal_attention
from kvtwin.optimized.synckv import _offload as offload_module
from kvtwin.optimized.synckv._transfers import StreamTransfers
from kvtwin.reference.contract.synckv.types import SyncKVConfig

from .. import bench_cake, bench_quest, bench_synckv
from ..peers import causal_peers
from . import keeping, pointwise, systems
from .base import Run
from .decoder import LLAMA_8B, Decoder, Loop, Model, by_token, small

STRIDE, SHARE, DRIFT = bench_synckv.STRIDE, bench_synckv.SHARE, bench_synckv.DRIFT
CYCLE = 2 * STRIDE
#: Room for the tokens that warm-up and rounds append.
SPARE = 1024
#: Batch, tokens in thousands, and whether to measure offload, which needs pinned host memory for all tokens.
SETTINGS = ((1, 16, True), (1, 32, True), (1, 64, True), (1, 128, True), (4, 128, False))
#: The percentages of all tokens that CAKE keeps in the paper's tables.
CAKE_SHARES = (20, 30, 50)


def run(run: Run) -> None:
    model = small(LLAMA_8B)._replace(query_heads=4, key_value_heads=4) if run.tiny else LLAMA_8B
    settings = ((1, 1, False),) if run.tiny else SETTINGS
    decoder = Decoder(model, run, 128 if run.tiny else 2**17 + SPARE)
    for batch, thousands, offloaded in settings:
        tokens = 30 if run.tiny else 1024 * thousands
        name = f"B{batch}-{thousands}K"
        if run.late(name):
            break
        with run.part(name):
            decode(run, decoder, name, batch, tokens, offload=False)
        if offloaded and not run.late(f"{name} offloaded"):
            with run.part(f"{name} offloaded"):
                decode(run, decoder, name, batch, tokens, offload=True)
        if not run.late(f"{name} quest"):
            with run.part(f"{name} quest"):
                decode_quest(run, decoder, name, batch, tokens)
        for percent in CAKE_SHARES:
            if not run.late(f"{name} cake {percent} %"):
                with run.part(f"{name} cake {percent} %"):
                    decode_cake(run, decoder, name, batch, tokens, percent)
    for _, thousands, _ in settings[:1] if run.tiny else (SETTINGS[0], SETTINGS[3]):
        name = f"prompt of {thousands}K"
        if not run.late(name):
            with run.part(name):
                prompt(run, model, name, 30 if run.tiny else 1024 * thousands)


def state_of(run: Run, model: Model, batch: int, tokens: int, *, offload: bool, layer: int = 0) -> synckv.SyncKVState:
    config = SyncKVConfig(
        max(1, tokens // SHARE), stride=STRIDE, max_tokens=tokens + (64 if run.tiny else SPARE), offload=offload,
        phase=bench_synckv.phase_of(layer) if offload else 0,
    )
    return synckv.SyncKVState(config, **systems.sizes_of(model, batch, run))


@contextmanager
def without_attention() -> Iterator[None]:
    """Replace the causal attention in a state's prefill, which would take longer than the measurement."""
    original = synckv.SyncKVState._attend_prompt
    synckv.SyncKVState._attend_prompt = lambda _, query, *__, **___: query.new_empty(1).expand(query.shape)  # type: ignore[method-assign]
    try:
        yield
    finally:
        synckv.SyncKVState._attend_prompt = original  # type: ignore[method-assign]


def filled(run: Run, model: Model, batch: int, tokens: int, *, offload: bool) -> list[synckv.SyncKVState]:
    """States of all layers, each with its own random prompt."""
    states = []
    for layer in range(model.layers):
        state = state_of(run, model, batch, tokens, offload=offload, layer=layer)
        query = run.draw(batch, model.query_heads, 1, model.head_dim).expand(-1, -1, tokens, -1)
        key, value = (run.draw(batch, model.key_value_heads, tokens, model.head_dim) for _ in range(2))
        with without_attention():
            state.prefill(query, key, value)
        states.append(state)
    return states


def decode(run: Run, decoder: Decoder, name: str, batch: int, tokens: int, *, offload: bool) -> None:
    model = decoder.model
    states = filled(run, model, batch, tokens, offload=offload)
    loop = Loop(decoder, batch, tokens - 1)
    axes = [run.draw(batch, model.query_heads, model.head_dim) for _ in range(2)]
    angle = torch.zeros(1, device=run.device)

    def cycle(step: systems.Step, length: int) -> None:
        for number in range(length):
            if number % STRIDE == 0:
                angle.add_(DRIFT).remainder_(2 * math.pi)
                rotated = (angle.cos() * axes[0] + angle.sin() * axes[1]).bfloat16()
            loop.step(by_token(lambda layer, _, key, value, rotated=rotated: step(layer, rotated, key, value)))

    length = STRIDE if run.tiny else CYCLE
    key = "offloaded" if offload else "synckv"
    resident = model.token_bytes * tokens * batch * 0.3
    moves = length * (model.weight_bytes + resident)

    def ours(length: int = length) -> None:
        cycle(lambda layer, *given: states[layer].step(*given), length)
        for state in states:
            state.join()                                       # a graph must end without pending transfers

    captured = True
    try:
        seconds = run.seconds(ours, what=f"{name} {key}", moves=moves)
    except RuntimeError as error:
        if not offload or isinstance(error, torch.cuda.OutOfMemoryError):
            raise
        captured = False
    if not captured:
        seconds = run.seconds(ours, what=f"{name} {key}", moves=moves, capture=False)
    before = states[0].chosen
    ours(STRIDE)
    overlap = float(synckv.overlap(before, states[0].chosen).mean())
    run.record(name, {f"{key}, ms a step": seconds / length * 1e3, f"{key}, captured": captured,
                      f"{key}, overlap": overlap,
                      f"{key}, bytes": sum(state.gpu_bytes() for state in states)})
    if not run.tiny and not 0.7 < overlap < 0.9:
        run.complain(f"{name} {key}: {overlap:.2f} of the chosen tokens stay, expected about 0.8")
    full = f"{name}: full attention"
    if not offload:
        given = [run.draw(batch, heads, model.head_dim) for heads in (model.query_heads, *[model.key_value_heads] * 2)]
        try:
            bench_synckv.verify_step(states[-1], *given)
        except AssertionError as error:
            run.complain(f"{name} {key}: wrong after timing: {str(error).splitlines()[0]}")
        pairs = [(state.key, state.value) for state in states]
        full_attention(run, loop, name, pairs, tokens, axes[0])
    found = run.figures[name]
    if "full attention, ms a step" in found:
        whole = model.weight_bytes + batch * tokens * model.token_bytes
        run.record(name, {
            f"{key}, times as fast": found["full attention, ms a step"] / found[f"{key}, ms a step"],
            "by bytes": whole / (model.weight_bytes + resident),
        })
    else:
        run.complain(f"{full} was not measured")


def full_attention(
    run: Run, loop: Loop, name: str, pairs: list[tuple[Tensor, Tensor]], tokens: int, query: Tensor
) -> None:
    """The same loop with full attention by the fastest kernel, also with a given query."""
    model, batch = loop.decoder.model, query.shape[0]
    place = torch.full((1,), tokens - 1, dtype=torch.int64, device=run.device)
    kernel = systems.fastest(run, model, *(tensor[:, :, :tokens] for tensor in pairs[0]))

    def step(layer: int, _: Tensor, key: Tensor, value: Tensor) -> Tensor:
        keys, values = pairs[layer]
        pointwise.put(keys, values, place, key, value)
        return systems.attention(kernel, query, keys[:, :, :tokens], values[:, :, :tokens])

    moves = model.weight_bytes + batch * tokens * model.token_bytes
    seconds = run.seconds(lambda: loop.step(by_token(step)), what=f"{name} full attention", moves=moves)
    share = run.share(moves, seconds)
    run.record(name, {"full attention, ms a step": seconds * 1e3, "kernel": kernel,
                      "full attention, share of bytes bound": share})
    run.own_bound(f"{name}: full attention", share)


def decode_quest(run: Run, decoder: Decoder, name: str, batch: int, tokens: int) -> None:
    """The same loop with Quest, which keeps all tokens on the GPU, in all layers."""
    model = decoder.model
    slots = tokens + (64 if run.tiny else SPARE)
    states = [keeping.quest_state(run, model, batch, tokens, slots) for _ in range(model.layers)]
    config = states[0].config
    # The bounds, and the pages of a query head. Heads of a group may select the same pages.
    read = 1 / config.page_size + config.pages_selected * config.page_size / tokens
    decode_whole(run, decoder, name, "quest", states, tokens, read, bench_quest.check_step)


def decode_cake(run: Run, decoder: Decoder, name: str, batch: int, tokens: int, percent: int) -> None:
    """The same loop with CAKE. All layers have the same budget; a cascade divides the same total otherwise."""
    budget = tokens * percent // 100
    states = [keeping.cake_state(run, decoder.model, batch, budget) for _ in range(decoder.model.layers)]
    decode_whole(run, decoder, name, f"cake {percent} %", states, tokens, percent / 100, bench_cake.check_step)


def decode_whole(
    run: Run, decoder: Decoder, name: str, method: str, states: list[Any], tokens: int, read: float,
    check_step: Callable[..., None],
) -> None:
    """Time the loop with states of all layers. read: the share of all keys and values that a step reads."""
    model, batch = decoder.model, states[0].sizes.batch
    loop = Loop(decoder, batch, tokens - 1)
    moves = model.weight_bytes + batch * tokens * model.token_bytes * read
    seconds = run.seconds(
        lambda: loop.step(by_token(lambda layer, *given: states[layer].step(*given))), what=f"{name} {method}",
        moves=moves,
    )
    heads = (model.query_heads, model.key_value_heads, model.key_value_heads)
    try:
        check_step(states[-1], *(run.draw(batch, count, model.head_dim) for count in heads))
    except AssertionError as error:
        run.complain(f"{name} {method}: wrong after timing: {str(error).splitlines()[0]}")
    found = run.figures.get(name, {})
    run.record(name, {f"{method}, ms a step": seconds * 1e3})
    if "full attention, ms a step" in found:
        run.record(name, {f"{method}, times as fast": found["full attention, ms a step"] / (seconds * 1e3)})


# A prompt ------------------------------------------------------------------------------------------------------------


class Kept(StreamTransfers):
    """Pinned memory that outlives its state and is reused, because allocating it takes longer than a prompt."""

    memory: ClassVar[list[Tensor]] = []

    def allocate(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        for number, tensor in enumerate(self.memory):
            if tensor.shape == shape:
                return self.memory.pop(number)
        return super().allocate(shape, dtype)


def prompt(run: Run, model: Model, name: str, tokens: int) -> None:
    """One layer's whole prefill, against attention alone by kvtwin's and PyTorch's kernels."""
    query, key, value = (
        run.draw(1, heads, tokens, model.head_dim)
        for heads in (model.query_heads, model.key_value_heads, model.key_value_heads)
    )
    occupied = torch.ones(1, tokens, dtype=torch.bool, device=run.device)
    figures: dict[str, float] = {}

    def timed(what: str, function: Callable[[], Any]) -> None:
        figures[f"{what}, ms a layer"] = 1e3 * run.seconds(function, what=f"{name}: {what}", capture=False, rounds=3)
        run.record(name, figures)

    timed("attention alone, ours", lambda: causal_attention(query, key, value, occupied, model.head_dim**-0.5))
    for peer, function in causal_peers(query, key, value).items():
        timed(f"attention alone, {peer}", function)
    for offload in (False, True):
        if offload and not run.cuda:
            continue
        original = offload_module.transfers_for
        if offload:
            offload_module.transfers_for = Kept
        try:
            state = state_of(run, model, 1, tokens, offload=offload)

            def prefill(state: synckv.SyncKVState = state) -> None:
                if state._offload is not None and state._offload.bank is not None:
                    Kept.memory.extend(state._offload.bank)
                state.reset()
                state.prefill(query, key, value)
                if state._offload is not None:
                    state._offload.transfers.wait()

            timed("offloaded" if offload else "synckv", prefill)
        finally:
            offload_module.transfers_for = original
            Kept.memory.clear()
    alone = {what: milliseconds for what, milliseconds in figures.items() if what.startswith("attention alone")}
    for what in ("synckv", "offloaded"):
        if f"{what}, ms a layer" in figures:
            milliseconds = figures[f"{what}, ms a layer"]
            run.record(name, {
                f"{what}, over attention alone": milliseconds / alone["attention alone, ours, ms a layer"],
                f"{what}, over the fastest attention": milliseconds / min(alone.values()),
            })
