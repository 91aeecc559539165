"""Cases from the recorded traces: queries, keys and values of a trained model on real text, and float64's decisions."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from ...fixtures.load import load_trace
from ..cases import supported
from ..cases.block_cases import PositionsCase
from ..cases.case import DecodeCase, WindowCase
from ..cases.key_cases import KeyCase
from ..cases.strategies import DTYPES
from ..cases.thought_cases import SparsityCase

LAYERS = (3, 6)
#: Decode steps of each layer; all of them on a GPU.
CPU_STEPS = 48


def tensors(layer: int, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """query [1, Hq, T, D], key and value [1, Hkv, T, D] of a layer, in the first dtype that is supported."""
    captured, dtype = load_trace("capture").tensors, supported.dtypes(DTYPES)[0]
    query, key, value = (captured[f"{layer}.{name}"].to(device, dtype) for name in ("query", "key", "value"))
    return query, key, value


def decode_steps(device: torch.device) -> Iterator[DecodeCase]:
    """LongFlow's decode steps with a budget of 64, in the slots that the recorded choices lead to."""
    golden = load_trace("longflow")
    prompt, steps = golden.metadata["prompt"], golden.metadata["steps"]
    for layer in LAYERS:
        query, key, value = tensors(layer, device)
        positions = torch.cat([golden.tensors[f"{layer}.64.kept"][0].long(), torch.tensor([-1])]).to(device)
        for step in range(steps if device.type == "cuda" else CPU_STEPS):
            positions[int(golden.tensors[f"{layer}.64.next_slot"][step])] = prompt + step
            occupied, newest = positions >= 0, positions == prompt + step
            place = positions.clamp_min(0)
            yield DecodeCase.of(
                query[:, :, prompt + step], key[:, :, place], value[:, :, place], occupied[None],
                protected=newest[None] if supported.protected() else None,
            )


def windows(device: torch.device) -> Iterator[WindowCase]:
    """Prompts of 192 tokens to compress, with a window of 16 tokens."""
    prompt = load_trace("capture").metadata["prompt"]
    for layer in LAYERS:
        query, key, value = (tensor[:, :, :prompt] for tensor in tensors(layer, device))
        for budget in (128, 64, 32):
            yield WindowCase.of(query[:, :, -16:].contiguous(), key.contiguous(), value.contiguous(), budget=budget)


def keys(device: torch.device) -> Iterator[KeyCase]:
    """The keys of prompts of 192 tokens."""
    prompt = load_trace("capture").metadata["prompt"]
    for layer in LAYERS:
        _, key, value = (tensor[:, :, :prompt].contiguous() for tensor in tensors(layer, device))
        for budget in (128, 64, 32):
            yield KeyCase.of(key, value, budget=budget)


def positions(device: torch.device) -> Iterator[PositionsCase]:
    """The caches of StreamingLLM: after the last block of a prompt of 192 tokens, when the block of 64 exceeds the
    budget of 64, and before each eviction of a decode step."""
    golden = load_trace("streaming_llm")
    for name, about in golden.metadata["cases"].items():
        config = about["config"]
        held = golden.tensors[f"{name}.held"].long().to(device)                              # [blocks, Hkv, budget]
        first = golden.metadata["prompt"] - config["block_size"]
        block = torch.arange(first, first + config["block_size"], device=device).expand(held.shape[1], -1)
        before = torch.cat((held[-2], block), -1)
        options = {"budget": config["budget"], "sinks": config["sinks"]}
        yield PositionsCase.given(before[None], **options)
        evicted, kept = golden.tensors[f"{name}.evicted"].long().to(device), held[-1]
        for step in range(len(evicted) if device.type == "cuda" else CPU_STEPS):
            newest = torch.full_like(kept[:, :1], golden.metadata["prompt"] + step)
            before = torch.cat((kept, newest), -1)
            yield PositionsCase.given(before[None], **options)
            kept = before[before != evicted[step][:, None]].view(kept.shape)


def sparsities(device: torch.device) -> Iterator[SparsityCase]:
    """Decode steps over all earlier tokens."""
    prompt = load_trace("capture").metadata["prompt"]
    for layer in LAYERS:
        query, key, _ = tensors(layer, device)
        for last in range(prompt, prompt + 8):
            for sparsity_of in ("heads", "mean"):
                yield SparsityCase.given(
                    query[:, :, last], key[:, :, :last + 1].contiguous(), sparsity_of=sparsity_of
                )
