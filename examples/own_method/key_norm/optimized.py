"""The optimized side: a Triton kernel scores the tokens of a block, and kvtwin's block cache evicts."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kvtwin.optimized.blocks import Block, BlockState, Policy

from .reference import KeyNormConfig

__all__ = ["KeyNormConfig", "KeyNormState"]

TILE = 16  # tokens of a program


@triton.jit
def score_kernel(
    key, occupied, score, heads, count, head_dim, key_row, key_head, key_slot, mask_row, mask_head,
    TILE: tl.constexpr, CHANNELS: tl.constexpr,
):
    """The scores of TILE tokens of a KV head. key_*, mask_*: strides. Keys of padding are not read."""
    row, head = (tl.program_id(0) // heads).to(tl.int64), (tl.program_id(0) % heads).to(tl.int64)
    token, channel = tl.program_id(1).to(tl.int64) * TILE + tl.arange(0, TILE), tl.arange(0, CHANNELS)
    inside = token < count
    valid = tl.load(occupied + row * mask_row + head * mask_head + token, mask=inside, other=0) != 0
    at = key + row * key_row + head * key_head + token[:, None] * key_slot + channel[None, :]
    k = tl.load(at, mask=valid[:, None] & (channel < head_dim)[None, :], other=0.0).to(tl.float32)
    norm = tl.sqrt_rn(tl.sum(k * k, 1))
    tl.store(score + (row * heads + head) * count + token, tl.where(valid, -norm, float("-inf")), mask=inside)


@torch.library.custom_op("key_norm::score", mutates_args=())
def score_tokens(key: Tensor, occupied: Tensor) -> Tensor:
    """-||k|| of each token, -inf for padding: key [B, Hkv, Q, D] with contiguous channels, occupied [B, Hkv, Q] bool
    with contiguous tokens. Returns [B, Hkv, Q] float32."""
    rows, heads, count, head_dim = key.shape
    result = torch.empty(key.shape[:3], dtype=torch.float32, device=key.device)
    with torch.cuda.device_of(key):
        score_kernel[rows * heads, triton.cdiv(count, TILE)](
            key, occupied, result, heads, count, head_dim, *key.stride()[:3], *occupied.stride()[:2],
            TILE, triton.next_power_of_2(head_dim),
        )
    return result


@score_tokens.register_fake
def _(key: Tensor, occupied: Tensor) -> Tensor:
    return torch.empty(key.shape[:3], dtype=torch.float32, device=key.device)


class KeyNormState(BlockState):
    """A cache of tokens with small keys. `score` is -||k||, which a token gets when it arrives."""

    Config = KeyNormConfig

    def _make_policy(self) -> Policy:
        return Policy(recent=self.config.recent)

    def _update(self, block: Block) -> tuple[Tensor | None, Tensor | None]:
        new = slice(self.config.capacity, block.end)  # the slots of the block
        vector = self.key[:, :, new]
        self.score[..., new] = score_tokens(vector, self.occupied[..., new])
        return self.score[..., :block.end], None
