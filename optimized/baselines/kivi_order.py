"""Where the codes and scales of a KIVI state lie in its memory.

They lie in the order of tokens or, with FRAGMENTS, where the lanes of `kivi_fragment_kernels.py` need them: 16
consecutive bytes for each lane, and whole lines of 128 bytes for a warp. In the order of tokens, a load of that kernel
would read halves of lines, and eighths for scales.

With FRAGMENTS, the words of a tile and 16 channels lie together, as do the scales and minima of two channels, and the
words and scales of a lane for several values.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

#: The words of keys in a tile, the lanes that share a value, and the channels of an operand.
WORDS_OF_TILE, LANES, PART = tl.constexpr(8), tl.constexpr(8), tl.constexpr(16)
#: The 32-bit numbers that a lane loads at once.
VECTOR = tl.constexpr(4)


@triton.jit
def key_word_at(word, d, HEAD_DIM: tl.constexpr, FRAGMENTS: tl.constexpr):
    """The place of channel d of a word of keys. FRAGMENTS: [tile, part, word of the tile, channel of the part]."""
    if FRAGMENTS:
        tile = word // WORDS_OF_TILE * (WORDS_OF_TILE * HEAD_DIM)
        return tile + word % WORDS_OF_TILE * PART + (d // PART * (WORDS_OF_TILE * PART) + d % PART)
    else:
        return word * HEAD_DIM + d


@triton.jit
def key_scale_at(group, d, HEAD_DIM: tl.constexpr, FRAGMENTS: tl.constexpr):
    """The place of channel d in the scales, or the minima, of a group of keys. FRAGMENTS: [group, pair of channels,
    (scale, minimum), channel of the pair], so that minima begin 2 numbers behind scales."""
    if FRAGMENTS:
        return group * (2 * HEAD_DIM) + (d // 2 * 4 + d % 2)
    else:
        return group * HEAD_DIM + d


@triton.jit
def value_word_at(token, w, HEAD_DIM: tl.constexpr, BITS: tl.constexpr, FRAGMENTS: tl.constexpr):
    """The place of word w of a value. FRAGMENTS: [several tokens, lane, token, word of the lane]."""
    EACH: tl.constexpr = HEAD_DIM * BITS // 32
    if FRAGMENTS:
        UNITS: tl.constexpr = EACH // LANES
        TOKENS: tl.constexpr = VECTOR // UNITS
        several = token // TOKENS * (TOKENS * EACH)
        return several + token % TOKENS * UNITS + (w // UNITS * VECTOR + w % UNITS)
    else:
        return token * EACH + w


@triton.jit
def value_scale_at(token, group, GROUPS: tl.constexpr, FRAGMENTS: tl.constexpr):
    """The place of a group of a value, in pairs of a scale and a minimum. FRAGMENTS: [four tokens, group, token]."""
    if FRAGMENTS:
        return token // VECTOR * (VECTOR * GROUPS) + token % VECTOR + group * VECTOR
    else:
        return token * GROUPS + group


def keys_by_word(codes: Tensor, scale: Tensor, minimum: Tensor, fragments: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Views of the codes [B, H, words, D], scales and minima of keys, whose dimensions 2 and 3 count words or groups,
    and the others channels. scale, minimum: [B, H, groups, D], with fragments [B, H, groups, D / 2, 2]."""
    if not fragments:
        return codes.unsqueeze(3), scale.unsqueeze(3), minimum.unsqueeze(3)
    *heads, words, channels = codes.shape
    tiles = codes.view(*heads, words // WORDS_OF_TILE.value, channels // PART.value, WORDS_OF_TILE.value, PART.value)
    return tiles.transpose(3, 4), scale.unsqueeze(3), minimum.unsqueeze(3)


def values_by_token(codes: Tensor, scales: Tensor, fragments: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Views of the codes [B, H, tokens, words], scales and minima of values, whose dimensions 2 and 3 count tokens, and
    the others words or groups. scales: [B, H, tokens, groups, 2]."""
    if not fragments:
        scale, minimum = scales.unbind(-1)
        return codes.unsqueeze(3), scale.unsqueeze(3), minimum.unsqueeze(3)
    *heads, tokens, words = codes.shape
    units = words // LANES.value
    several = VECTOR.value // units
    scale, minimum = scales.view(*heads, tokens // VECTOR.value, -1, VECTOR.value, 2).transpose(3, 4).unbind(-1)
    return codes.view(*heads, tokens // several, LANES.value, several, units).transpose(3, 4), scale, minimum


def in_token_order(part: Tensor) -> Tensor:
    """A copy [B, H, N, M] of a view of `keys_by_word` or `values_by_token`."""
    return part.flatten(2, 3).flatten(3)
