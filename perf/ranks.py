"""What ranks cost inside a decode step: states of half of the heads, alone and with a process group of two GPUs.

    python -m torch.distributed.run --standalone --nproc-per-node=2 -m perf.ranks

For each method, a step is timed as it is launched, and as a replay of a CUDA graph. Replays are also compared with
steps that were not captured: outputs and positions must have the same bits.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from kvtwin.optimized import longflow, synckv, thinkv
from kvtwin.reference.longflow import LongFlowConfig
from kvtwin.reference.synckv import HeadClusters, SyncKVConfig
from kvtwin.reference.thinkv import ThinKVConfig

DTYPE = torch.bfloat16
HEAD_DIM = 128
#: Query heads and KV heads of all ranks.
QUERY_HEADS, KEY_VALUE_HEADS = 32, 8
STEPS, REPEATS = 50, 7

#: Makes a state from the number of KV heads of all its ranks and the keyword arguments of its sizes.
Make = Callable[..., Any]


def methods(tiny: bool) -> dict[str, tuple[Make, int, int]]:
    """Of each method: how to make a state, the batch, and the tokens of the prompt."""
    tokens, batch = (24, 2) if tiny else (3200, 32)
    room = tokens + 2 * STEPS * (REPEATS + 2)

    def of_longflow(heads: int, **sizes: Any) -> Any:
        return longflow.LongFlowState(LongFlowConfig(tokens), **sizes)

    def of_thinkv(heads: int, **sizes: Any) -> Any:
        return thinkv.ThinKVState(ThinKVConfig(budget=tokens, max_tokens=room), **sizes)

    def of_synckv(heads: int, **sizes: Any) -> Any:
        """Each two heads are a cluster."""
        clusters = HeadClusters(tuple(head // 2 for head in range(heads)), tuple(range(0, heads, 2)))
        config = SyncKVConfig(tokens // 4, clusters=heads // 2, max_tokens=room)
        return synckv.SyncKVState(config, head_clusters=clusters, **sizes)

    return {
        "longflow": (of_longflow, batch, tokens - 1), "thinkv": (of_thinkv, batch, tokens),
        "synckv": (of_synckv, batch, tokens),
    }


def draw(count: int, batch: int, seed: int, device: torch.device, ranks: int) -> list[Tensor]:
    """query [B, Hq, count, D]; key, value [B, Hkv, count, D], of one rank's heads."""
    generator = torch.Generator(device).manual_seed(seed)
    return [
        torch.randn(batch, heads // ranks, count, HEAD_DIM, dtype=DTYPE, device=device, generator=generator)
        for heads in (QUERY_HEADS, KEY_VALUE_HEADS, KEY_VALUE_HEADS)
    ]


def milliseconds(run: Callable[[], object]) -> float:
    """The median over REPEATS of the mean of STEPS runs."""
    found = []
    for _ in range(REPEATS):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        dist.barrier()
        start.record()
        for _ in range(STEPS):
            run()
        end.record()
        end.synchronize()
        found.append(start.elapsed_time(end) / STEPS)
    return statistics.median(found)


def captured(state: Any, token: list[Tensor]) -> tuple[torch.cuda.CUDAGraph, Tensor]:
    """A graph of a step, and its output. The state has taken a step before."""
    graph = torch.cuda.CUDAGraph()
    # NCCL's own thread queries events meanwhile, which a capture of all threads forbids.
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        output = state.step(*token)
    return graph, output


def new_state(make: Make, group: Any, batch: int, prompt: list[Tensor], ranks: int) -> Any:
    own = KEY_VALUE_HEADS // ranks
    state = make(
        own if group is None else KEY_VALUE_HEADS, batch=batch, query_heads=QUERY_HEADS // ranks, key_value_heads=own,
        head_dim=HEAD_DIM, dtype=DTYPE, device=prompt[0].device, process_group=group,
    )
    state.prefill(*prompt)
    return state


def measure(name: str, make: Make, batch: int, tokens: int) -> dict[str, Any]:
    rank, ranks, group = dist.get_rank(), dist.get_world_size(), dist.group.WORLD
    device = torch.device("cuda", torch.cuda.current_device())
    prompt = draw(tokens, batch, 10 + rank, device, ranks)
    token = [tensor[:, :, 0] for tensor in draw(1, batch, 20 + rank, device, ranks)]
    result: dict[str, Any] = {"method": name, "batch": batch, "tokens": tokens}
    for label, with_group in (("alone", None), ("ranks", group)):
        state = new_state(make, with_group, batch, prompt, ranks)
        state.step(*token)
        result[f"{label}, launched, ms"] = milliseconds(lambda state=state: state.step(*token))
        graph, _ = captured(state, token)
        result[f"{label}, replayed, ms"] = milliseconds(graph.replay)
        del state, graph
    one, other = (new_state(make, group, batch, prompt, ranks) for _ in range(2))
    for state in (one, other):
        state.step(*token)
    graph, output = captured(other, token)
    for _ in range(STEPS):
        expected = one.step(*token)
        graph.replay()
        assert torch.equal(output, expected), f"{name}: the output of a replay differs"
    assert torch.equal(one.positions, other.positions), f"{name}: the positions of a replay differ"
    return result


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="perf.ranks", description="The cost of ranks inside a decode step.")
    parser.add_argument("--out", type=Path, help="a JSON file for the results")
    parser.add_argument("--tiny", action="store_true", help="run tiny sizes, as a test; the figures are meaningless")
    options = parser.parse_args(arguments)
    if "RANK" not in os.environ:
        parser.error("start it with: python -m torch.distributed.run --standalone --nproc-per-node=2 -m perf.ranks")
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl")
    found = []
    with torch.no_grad():
        for name, (make, batch, tokens) in methods(options.tiny).items():
            found.append(measure(name, make, batch, tokens))
            if dist.get_rank() == 0:
                print(json.dumps(found[-1]), flush=True)
                if options.out is not None:
                    options.out.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    sys.exit(main())
