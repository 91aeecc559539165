"""``python -m kvtwin.conformance.lab.endurance``: decode 100,000 tokens with every state, and check what has changed.

It prints a line per state, and exits with 1 if a check fails:

- Memory: the number of live tensors, their bytes, and the memory that torch has allocated on a GPU are at most what
  they were in the first half of the steps. ThinKV's reference may have twice as much: it stores some tokens of each
  window, and each of them keeps the tokens that were quantized with it.
- Counters: `tokens_seen` is exact. The positions of a row's tokens are distinct, and lie between 0 and `tokens_seen`.
  A state that always fills its budget holds as many tokens at the end as at half of the steps.
- The last steps: a copy of the state in other memory gives the same bits. The outputs are those of float64 attention to
  the keys and values that the state holds, within the derived bounds; not for SyncKV, whose heads attend to a part of
  the tokens, and ThinKV, which quantizes them. After `reset()`, the state gives the same bits as a new one.
"""

from __future__ import annotations

import argparse
import copy
import gc
import sys
import time
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from .. import discovery, interpreter

STEPS, REFERENCE_STEPS, LAST, CHUNK = 100_000, 10_000, 50, 500
SAMPLES = 8  # of the memory, in each half of the steps
BATCH, QUERY_HEADS, KEY_VALUE_HEADS, HEAD_DIM, BUDGET, PROMPT = 2, 4, 2, 64, 64, 48
#: Options of methods whose config has `max_tokens`. SyncKV stores all tokens, ThinKV at least 4 tokens of each 128.
OPTIONS: dict[str, dict[str, Any]] = {"synckv": {"clusters": 1}, "thinkv": {"budget": 1024, "edges": (0.2, 0.5)}}


class Failed(Exception):
    """A check failed; the message says which."""


def config_of(pair: discovery.Pair, steps: int) -> Any:
    from ..judge import checkers

    assert pair.config is not None
    options = checkers.with_budget(pair.name, BUDGET) | checkers.required(pair.name)
    options |= OPTIONS.get(pair.name, {})
    if pair.name in OPTIONS:
        options["max_tokens"] = PROMPT + steps + LAST
    return pair.config(**options)


def new_state(pair: discovery.Pair, side: Any, device: torch.device, steps: int) -> Any:
    assert pair.state is not None
    return getattr(side, pair.state.__name__)(
        config_of(pair, steps), batch=BATCH, query_heads=QUERY_HEADS, key_value_heads=KEY_VALUE_HEADS,
        head_dim=HEAD_DIM, dtype=torch.float32, device=device,
    )


def tokens(device: torch.device, seed: int, count: int) -> Iterator[tuple[Tensor, ...]]:
    """query [B, Hq, D], key and value [B, Hkv, D] of `count` tokens, on a GPU drawn there."""
    generator = torch.Generator(device).manual_seed(seed)
    heads = QUERY_HEADS + 2 * KEY_VALUE_HEADS
    for start in range(0, count, CHUNK):
        drawn = torch.randn(min(CHUNK, count - start), BATCH, heads, HEAD_DIM, generator=generator, device=device)
        for token in drawn:
            query, key, value = token.split((QUERY_HEADS, KEY_VALUE_HEADS, KEY_VALUE_HEADS), 1)
            yield query.contiguous(), key.contiguous(), value.contiguous()


def decode(state: Any, seed: int, count: int, wrong: list[str] | None = None) -> list[Tensor]:
    """The outputs of the last LAST of `count` steps. wrong: gets a message for each that is not attention to the cache.
    """
    from ..judge import checkers

    outputs: list[Tensor] = []
    device = state.device
    for number, token in enumerate(tokens(device, seed, count)):
        last = number >= count - LAST
        before = [one.clone() for one in (state.key, state.value, state.occupied)] if wrong is not None and last else []
        output = state.step(*token, **checkers.extras(state, *token))
        if last:
            outputs.append(output.clone())
        if wrong is not None and last:
            wrong += error_of_attention(state, token, output, before)
    return outputs


def error_of_attention(state: Any, token: Sequence[Tensor], output: Tensor, before: Sequence[Tensor]) -> list[str]:
    """A message unless the output of a step is float64 attention to the new token and the tokens that the state held.
    """
    from ..cases import oracle
    from ..judge import bounds
    from ..judge.compare import assert_within

    query, key, value = token
    if hasattr(state, "next_slot"):  # the new token has replaced another before it attended
        keys, values, occupied = state.key, state.value, state.occupied
    else:
        keys, values = (torch.cat((old, new[:, :, None]), 2) for old, new in zip(before, (key, value), strict=False))
        occupied = torch.nn.functional.pad(before[2], (0, 1), value=True)
    here = [tensor.cpu() for tensor in (query, keys, values, occupied)]
    truth = oracle.attend(*here, scale=state.scale)
    bound = bounds.output_error(truth, bounds.arithmetic(query.dtype))
    try:
        assert_within(output.cpu(), truth.output[:, :, 0], bound[:, :, 0], what="the output")
    except AssertionError as error:
        return [str(error)]
    return []


def prefill(state: Any) -> Tensor:
    from ..judge import checkers

    prompt = [torch.stack(parts, 2) for parts in zip(*tokens(state.device, 1, PROMPT), strict=True)]
    output: Tensor = state.prefill(*prompt, **checkers.extras(state, *prompt))
    return output


def hide_objects() -> None:
    """Hide the objects that exist now from the garbage collector and its list."""
    gc.collect()
    gc.freeze()


def memory(device: torch.device) -> tuple[int, ...]:
    """The number of strided tensors on a kind of device that Python holds, the bytes of their storages, and the bytes
    that torch has allocated on a GPU. Call `hide_objects` first."""
    gc.collect()
    found = [one for one in gc.get_objects() if type(one) is Tensor and one.device.type == device.type]
    live = [tensor for tensor in found if tensor.layout == torch.strided]
    storages = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in live}
    allocated = torch.cuda.memory_allocated(device) if device.type == "cuda" else 0
    return len(live), sum(storages.values()), allocated


def held_slots(state: Any) -> list[int]:
    found: list[int] = state.occupied.flatten(0, -2).sum(-1).tolist()
    return found


def check_counters(state: Any, seen: int) -> None:
    if state.tokens_seen != seen:
        raise Failed(f"expected tokens_seen = {seen}, got {state.tokens_seen}")
    for row, holds in zip(state.positions.flatten(0, -2), state.occupied.flatten(0, -2), strict=True):
        positions = row[holds].tolist()
        if len(set(positions)) < len(positions) or not all(0 <= position < seen for position in positions):
            raise Failed(f"expected distinct positions from 0 to {seen - 1}, got {sorted(positions)[-8:]}")


def same(one: Sequence[Tensor], other: Sequence[Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


def endure(pair: discovery.Pair, side: Any, device: torch.device, steps: int) -> dict[str, Any]:
    """Run one state. Returns what was measured. Raises Failed."""
    hide_objects()
    state = new_state(pair, side, device, steps)
    prefill(state)
    peaks = []
    for half in range(2):
        samples = []
        for number in range(SAMPLES):
            decode(state, 10 * half + number, (steps // 2 - half * LAST) // SAMPLES)
            samples.append(memory(device))
        peaks.append(tuple(map(max, zip(*samples, strict=True))))
        if half == 0:
            held_before = held_slots(state)
    allowed = 2 if pair.name == "thinkv" and side is pair.reference else 1
    if any(later > allowed * earlier for earlier, later in zip(*peaks, strict=True)):
        raise Failed(f"memory grows: (tensors, bytes, allocated) at most {peaks[0]} in the first half, then {peaks[1]}")
    seen = PROMPT + sum((steps // 2 - half * LAST) // SAMPLES * SAMPLES for half in range(2))
    check_counters(state, seen)
    if pair.name not in OPTIONS and held_slots(state) != held_before:
        raise Failed(f"expected {held_before} tokens as after half of the steps, got {held_slots(state)}")
    twin = copy.deepcopy(state)
    wrong: list[str] = []
    if not same(decode(state, 4, LAST, wrong if pair.name not in OPTIONS else None), decode(twin, 4, LAST)):
        raise Failed(f"the last {LAST} steps differ from those of a copy of the state")
    if wrong:
        raise Failed(f"{len(wrong)} of the last {LAST} steps are not attention to the tokens held: {wrong[0]}")
    check_counters(state, seen + LAST)
    new = new_state(pair, side, device, steps)
    state.reset()
    if not torch.equal(prefill(state), prefill(new)) or not same(decode(state, 5, LAST), decode(new, 5, LAST)):
        raise Failed("after reset(), the state differs from a new one")
    return {"tokens": seen + LAST, "held": max(held_slots(twin)), "tensors": peaks[1][0], "bytes": peaks[1][1]}


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("methods", nargs="*", metavar="METHOD", help="default: all")
    parser.add_argument("--side", choices=("optimized", "reference"), default="optimized")
    parser.add_argument("--steps", type=int, help=f"default: {STEPS:,}, and {REFERENCE_STEPS:,} of the reference")
    chosen = parser.parse_args(arguments)
    pairs = {pair.name: pair for pair in discovery.methods()}
    if unknown := [name for name in chosen.methods if name not in pairs]:
        parser.error(f"no method {', '.join(unknown)}; there are: {', '.join(pairs)}")
    steps = chosen.steps or (STEPS if chosen.side == "optimized" else REFERENCE_STEPS)
    if steps < 10 * LAST:
        parser.error(f"--steps must be at least {10 * LAST}, got {steps}")
    torch.set_num_threads(1)  # tensors are small
    if chosen.side == "reference" or not torch.cuda.is_available():
        interpreter.turn_on()
        interpreter.prepare()
    cuda = chosen.side == "optimized" and torch.cuda.is_available()
    device = torch.device("cuda", torch.cuda.current_device()) if cuda else torch.device("cpu")
    failed = False
    for name in chosen.methods or pairs:
        start = time.perf_counter()
        try:
            said = ", ".join(f"{key} {value:,}" for key, value in endure(
                pairs[name], getattr(pairs[name], chosen.side), device, steps
            ).items())
        except Failed as error:
            said, failed = f"FAILED: {error}", True
        print(f"{name} ({chosen.side}, {device.type}): {said}, {time.perf_counter() - start:.0f} s", flush=True)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
