"""StreamingLLM: `StartRecentKVCache` and the attention with shifted positions beside `StreamingLLMState`."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace

import torch
from torch import Tensor

from .....reference.baselines.streaming_llm import StreamingLLMConfig, StreamingLLMState
from ..checkout import Checkout, Project, StandIns
from ..comparison import Comparison, Kept, Outputs, at_positions, held
from ..inputs import blocks, causal, hidden, layer, repeated, rotate_half, state, tokens

STAND_INS: StandIns = {"transformers.models.llama.modeling_llama": {"rotate_half": rotate_half, "repeat_kv": repeated}}
HEADS, QUERY_HEADS, HEAD_DIM, STEPS = 2, 4, 16, 40
#: A rotary embedding over all channels of a head.
INV_FREQ = tuple(10000.0 ** (-2 * pair / HEAD_DIM) for pair in range(HEAD_DIM // 2))


def rotary(_: Tensor, seq_len: int) -> tuple[Tensor, Tensor]:
    """The cosines and sines of the positions below seq_len, [1, 1, T, D], as old versions of transformers gave them."""
    angle = torch.arange(seq_len, dtype=torch.float64)[:, None] * torch.tensor(INV_FREQ, dtype=torch.float64)
    angle = torch.cat([angle, angle], -1)[None, None]
    return angle.cos(), angle.sin()


def compare(checkout: Checkout) -> Iterator[Comparison]:
    cache = checkout.load("streaming_llm.kv_cache").StartRecentKVCache
    forward = checkout.load(
        "streaming_llm.pos_shift.modify_llama", stand_ins=STAND_INS
    ).llama_pos_shift_attention_forward
    attention = layer(QUERY_HEADS, HEADS, HEAD_DIM, config=SimpleNamespace(pretraining_tp=1))
    attention.rotary_emb = rotary
    kept, outputs, plain = Kept(), Outputs(), Outputs()
    for seed, (prompt, sinks, recent) in enumerate([(50, 4, 16), (31, 1, 12), (6, 4, 20), (70, 8, 8)]):
        query, key, value = tokens(seed, prompt + STEPS, heads=HEADS, query_heads=QUERY_HEADS, head_dim=HEAD_DIM)
        evict, past = cache(sinks, recent), None
        configs = (
            StreamingLLMConfig(sinks + recent, sinks=sinks, block_size=prompt, inv_freq=given)
            for given in (INV_FREQ, None)
        )
        ours, as_told = (state(StreamingLLMState, config, query, key) for config in configs)
        for first, end in blocks(prompt, STEPS):
            block = [tensor[:, :, first:end] for tensor in (query, key, value)]
            length = 0 if past is None else past[0].shape[2]
            positions, mask = torch.arange(length, length + end - first)[None], None if first else causal(prompt)
            output, _, past = forward(attention, hidden(*block), mask, positions, past, use_cache=True)
            if first:
                outputs.add_step(ours, block, output)
                plain.add_step(as_told, block, output)
            else:
                ours.prefill(*block)
                as_told.prefill(*block)
            (past,) = evict([past])
            kept.add_held(held(past[0], key), at_positions(ours.positions, prompt + STEPS), first, end)
    yield Comparison("tokens kept after a prompt and 40 steps", "decisions", kept)
    yield Comparison(
        "outputs of steps", "numbers", plain, ("streaming_llm.positions",), outputs, "inv_freq of the model"
    )


PROJECT = Project(
    "https://github.com/mit-han-lab/streaming-llm", "2e5042606d69933d88fbf909bd77907456b9b4dd",
    ("streaming_llm/kv_cache.py", "streaming_llm/pos_shift/modify_llama.py"), compare,
)
