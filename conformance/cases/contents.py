"""Contents of a case's tensors: ordinary numbers, and every kind of content that has broken a kernel.

Tensors are filled on the case's device from a torch.Generator with the case's seed, so the same seed gives other
numbers on a GPU than on the CPU; a saved case contains the numbers themselves. Numbers are made in float32 and rounded
to the case's dtype. The rounded numbers are the inputs, so this rounding is not part of any bound.
"""

from __future__ import annotations

import itertools
import math
from typing import NamedTuple

import torch
from torch import Tensor

from ...reference.contract.scales import FP8

#: Contents of query, key and value. Failing examples shrink to the first.
CONTENTS = (
    "ordinary", "duplicates", "near_ties", "zero_values", "dominant", "equal_keys", "overflow_88", "extreme_1e4",
    "many_87", "all_below_104", "integers", "identical", "zero_query", "tiny_values", "all_zero_values",
)
OCCUPANCIES = ("full", "random", "left_padding", "one_free", "one_token", "empty_row")
PROTECTIONS = ("none", "newest", "random", "all_but_one", "all")
#: Multiples of the golden ratio, modulo 1, are spread over all of it.
GOLDEN = (math.sqrt(5) - 1) / 2
#: Contents of unoccupied slots.
POISONS = ("zero", "nan", "inf", "largest", "stale")


class Tokens(NamedTuple):
    """query [B, Hq, Q, D], key and value [B, Hkv, S, D], float32."""

    query: Tensor
    key: Tensor
    value: Tensor


def fill(
    content: str, generator: torch.Generator, *, batch: int, key_value_heads: int, group: int, queries: int,
    slots: int, head_dim: int, dtype: torch.dtype, scale: float,
) -> Tokens:
    """Make query, key and value of the given content, rounded to `dtype`."""
    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, device=generator.device)

    query = normal(batch, key_value_heads * group, queries, head_dim)
    key, value = normal(2, batch, key_value_heads, slots, head_dim)
    if content in AIMS:
        # The queries of a group are nearly parallel, so that all of them get the intended logits.
        lead = query[:, ::group, :1]
        query = lead.repeat_interleave(group, 1) * (1 + 0.01 * normal(*query.shape))
        low, high = AIMS[content]
        wanted = low + (high - low) * torch.rand(
            batch, key_value_heads, slots, 1, generator=generator, device=generator.device
        )
        if content == "first_unseen":
            wanted[:, :, :slots // 3] = -40.0
        key = wanted / (scale * lead.square().sum(-1, keepdim=True)) * lead + 0.01 * key
        if content == "one_alone":
            key[:, :, [min(1, slots - 1), 3 * slots // 4]] = 0
    elif content == "dominant":
        key[:, :, _some(generator, slots, 1)] = (60 / scale / query[:, ::group, :1].square().sum(-1, keepdim=True)
                                                * query[:, ::group, :1])
    elif content == "classes":
        count = min(CLASSES, head_dim - 1) - 1
        channel, token = (torch.arange(size, device=key.device) for size in (head_dim, slots))
        key = 16.0 * (channel == _class_of(slots, count, key.device)[:, None])
        key[token % 6 == 3, -1] = -2.0**-22 / scale
        key = key.expand(value.shape)
        other = torch.randint(1, count, query.shape[:3], generator=generator, device=key.device)
        other = 1 + (_class_of(queries, count, key.device) - 1 + other)[..., None] % count
        unseen = (channel > 0) & (channel != other) & (channel <= count)
        query = torch.where(channel == head_dim - 1, 1.0, -200 / (16 * scale) * unseen).expand(query.shape)
    elif content == "units_apart":
        # In one channel, of five tokens two have much higher logits, two much lower ones, and the fifth, in between,
        # one of a few logits that lie a unit in the last place apart: equal ones among them, and neighbours.
        query, key = torch.zeros_like(query), torch.zeros_like(key)
        query[..., 0], few = 1.0, torch.randint(4, value.shape[:3], generator=generator, device=key.device) * 2.0**-21
        kind = torch.rand(value.shape[:3], generator=generator, device=key.device).argsort(-1) % 5
        key[..., 0] = torch.where(kind == 4, few, (kind % 2 * 2 - 1) * (1 + value[..., 0].abs())) / scale
    elif content == "equal_keys":
        key = key[:, :, :1].expand(key.shape)
    elif content == "two_keys":
        key = key[:, :, torch.arange(slots, device=key.device) % 2 * (slots > 1)]
    elif content == "identical":
        key, value = key[:, :, :1].expand(key.shape), value[:, :, :1].expand(value.shape)
    elif content == "odd_keys":
        # A token in two of ordinary size, the others zero, tiny and huge.
        half = 10.0 if dtype == torch.float16 else 60.0
        factor = torch.tensor([1.0, 0.0, 1.0, 2.0**-half, 1.0, 2.0**half], device=key.device)
        order = torch.randperm(slots, generator=generator, device=generator.device)
        key = key * factor[order % len(factor), None]
    elif content == "long_keys":
        # Of four tokens, the first is so long that squares in float32 overflow, the last so short that they vanish.
        half = 10.0 if dtype == torch.float16 else 83.0
        factor = torch.tensor([2.0**half, 1.0, 1.0, 2.0**-half], device=key.device)
        key = key * factor[torch.arange(slots, device=key.device) % len(factor), None]
    elif content == "narrow_values":
        # In every second channel, all numbers are 1000 but for a few units in the last place.
        few = torch.randint(4, value.shape, generator=generator, device=value.device)
        narrow = torch.arange(head_dim, device=key.device) % 2 == 0
        value = torch.where(narrow, 1000 * (1 + few * torch.finfo(dtype).eps), value)
    elif content == "rows_of_sizes":
        half = 10.0 if dtype == torch.float16 else 100.0
        row = torch.arange(batch, device=key.device).view(-1, 1, 1, 1)
        key = key * torch.exp2(half * (row % 3 - 1))
    elif content == "integers":
        query, key, value = query.round(), key.round(), value.round()
    elif content == "zero_query":
        query = torch.zeros_like(query)
    elif content == "tiny_values":
        # A power of two per token, down to subnormal numbers, which hardware may flush to zero.
        least = -22 if dtype == torch.float16 else -126
        power = torch.randint(least, least // 2, (slots, 1), generator=generator, device=generator.device)
        value = value * torch.exp2(power.float())
    elif content == "all_zero_values":
        value = torch.zeros_like(value)
    elif content == "largest_values":
        # All are the largest float16 number. The weights of all tokens but the first lie just above the middle of two
        # float16 numbers: rounded up, they add up to so much that the mean is beyond float16, if it is not bounded.
        value = torch.full_like(value, torch.finfo(torch.float16).max)
        query, key = torch.zeros_like(query), torch.zeros_like(key)
        wanted = torch.tensor(math.log((1 + 2.0**-11 + 2.0**-13) / 2) / scale, dtype=torch.float64)
        query[..., :2], key[:, :, 1:, 0] = 1, wanted.half()
        key[:, :, 1:, 1] = wanted - wanted.half()
    elif content == "outliers":
        query, key, value = _with_outliers(query, key, value, group)
    elif content in STEPS:
        query, key, value = _between_two(query, key, value, group, STEPS[content], generator)
    elif content == "zero_values":
        value[:, :, _some(generator, slots, 1 + slots // 4)] = 0
    query, key, value = (tensor.to(dtype) for tensor in (query, key, value))
    if content in ("duplicates", "near_ties"):
        key, value = _copies(key, value, generator, exact=content == "duplicates")
    return Tokens(query, key, value)


#: The classes of tokens of the content "classes": first three tokens of class 0, then three of the next one, and so on.
#: Those of a class have equal keys. A query gives the tokens of class 0 and of another one, which is not its own, a
#: logit of exactly 0, and weights that vanish to all others. So three tokens at a time have equal scores in any
#: arithmetic, many of them 0. Of every second three, the first token has a logit, and so a score, that is lower by one
#: unit in the last place of a float32 of 1.
CLASSES = 6
#: Contents with logits in a given range. "one_alone": but for two keys of zeros. So the first of these has a weight of
#: exactly 1 until the second one comes, then both have 1/2, in any arithmetic: the exponentials of all others vanish.
#: "first_unseen": the first third has much lower logits, so that a method would evict all its first tokens.
AIMS = {
    "overflow_88": (-120.0, 120.0), "extreme_1e4": (-1e4, 1e4), "many_87": (86.5, 87.5),
    "all_below_104": (-140.0, -104.5), "one_alone": (-400.0, -200.0),
    "first_unseen": (-1.0, 1.0),
}

#: Contents whose numbers are one of two in each head, and the codes above 0 that stand for the greater one.
STEPS = {"steps_of_2_bits": 3, "steps_of_4_bits": 15}


def _class_of(tokens: int, count: int, device: torch.device) -> Tensor:
    """The classes of tokens, 0 and others up to `count`, [tokens]."""
    number = torch.arange(tokens, device=device) // 3
    return torch.where(number > 0, 1 + (number - 1) % count, 0)


def _some(generator: torch.Generator, slots: int, count: int) -> Tensor:
    """`count` different slots."""
    return torch.randperm(slots, generator=generator, device=generator.device)[:count]


def _with_outliers(query: Tensor, key: Tensor, value: Tensor, group: int) -> tuple[Tensor, Tensor, Tensor]:
    """2^15 in a channel of a key, or of a value, in two of three heads, at another place of each: as in real models, a
    few numbers are thousands of times as large as the others. In the first half of the tokens.

    The query is smaller by 2^-13 in a channel with such a key, so that logits are ordinary.
    """
    batch, heads, slots, head_dim = key.shape
    query, key, value = query.clone(), key.clone(), value.clone()
    for number, (row, head) in enumerate(itertools.product(range(batch), range(heads))):
        token = (slots // 2 - 1) * number // max(1, batch * heads - 1)
        channel = int(head_dim * (number * GOLDEN % 1))
        kind = (row + head) % 3
        if kind == 1:
            key[row, head, token, channel] = 2.0**15
            query[row, head * group:(head + 1) * group, :, channel] *= 2.0**-13
        elif kind == 2:
            value[row, head, token, channel] = -(2.0**15)
    return query, key, value


def _between_two(
    query: Tensor, key: Tensor, value: Tensor, group: int, levels: int, generator: torch.Generator
) -> tuple[Tensor, Tensor, Tensor]:
    """Heads whose keys, or values, are one of two numbers that are `levels` steps of 2^11 apart: 0 and a positive one,
    two positive ones, a negative one and a small one, so that the step rounds up to 2^11 in bfloat16. In others, the
    channels of a value are one negative number with an exponent of -117. The first head is ordinary.

    Times 2^117, which moves a code from the lowest bits of a bfloat16 to 1, a step of 2^11 overflows; numbers near
    2^-117 are subnormal before they are moved. The query is smaller by as much as keys are larger.
    """
    batch, heads, slots, head_dim = key.shape
    step = 2.0**11
    ulp = 2.0**(int(math.log2(levels)) - 7) * step                              # of bfloat16, at the greater number
    pairs = ((0.0, levels * step), (2 * step, (levels + 2) * step), (ulp - levels * step, 0.75 * ulp))
    query, key, value = query.clone(), key.clone(), value.clone()
    for number, (row, head) in enumerate(itertools.product(range(batch), range(heads))):
        kind = (number + row) % (2 * len(pairs) + 2)
        chosen, of_keys = divmod(kind - 1, 2)
        if kind == 2 * len(pairs) + 1:
            value[row, head] = -(1.25 + value[row, head, :, :1].abs() / 8) * 2.0**-117
        elif kind:
            low, high = pairs[chosen]
            one = torch.rand(slots, head_dim, generator=generator, device=key.device) < 0.5
            (key if of_keys else value)[row, head] = torch.where(one, high, low)
            if of_keys:
                query[row, head * group:(head + 1) * group] /= levels * step
    return query, key, value


def _copies(key: Tensor, value: Tensor, generator: torch.Generator, *, exact: bool) -> tuple[Tensor, Tensor]:
    """Make several copies of the token with the lowest score; if not exact, tokens one ulp from it.

    Its score is the lowest because its value is scaled by 2^-4.
    """
    slots = key.shape[2]
    chosen = _some(generator, slots, min(slots, 2 + slots // 4))
    key, value = key.clone(), value.clone()
    value[:, :, chosen] = value[:, :, chosen[:1]] * 2.0**-4
    key[:, :, chosen] = key[:, :, chosen[:1]]
    if not exact:
        for place, slot in enumerate(chosen[1:].tolist()):
            tensor = (value, key)[place % 2]
            channel = place % key.shape[-1]
            tensor[:, :, slot, channel] = next_up(tensor[:, :, slot, channel])
    return key, value


def next_up(tensor: Tensor) -> Tensor:
    """The next number away from zero in the tensor's dtype: one ulp."""
    bits = tensor.contiguous().view({2: torch.int16, 4: torch.int32}[tensor.element_size()])
    return (bits + 1).view(tensor.dtype)


def occupancy(kind: str, generator: torch.Generator, shape: tuple[int, ...]) -> Tensor:
    """Make a mask of occupied slots, [B, S] or [B, Hkv, S] bool.

    "stairs": the last S / 4 slots of the second row, and the last S / 16 of the third; at least one in each row.
    "stairs_down": the first ones, so that padding comes last. "ends": row r lacks its first 2 r slots and its last r.
    "gap": all rows but the first lack a slot in the middle.
    """
    slots, device = shape[-1], generator.device
    index = torch.arange(slots, device=device).expand(shape)
    draw = torch.randint(slots, shape[:-1], generator=generator, device=device)[..., None]
    if kind == "random":
        return torch.rand(shape, generator=generator, device=device) < 0.7
    if kind == "left_padding":
        return index >= draw
    if kind in ("stairs", "stairs_down"):
        row = torch.arange(shape[0], device=device).view(-1, *[1] * (len(shape) - 1))
        count = (slots // 4**row).clamp_min(1)
        return index >= slots - count if kind == "stairs" else index < count
    if kind in ("ends", "gap"):
        row = torch.arange(shape[0], device=device).view(-1, *[1] * (len(shape) - 1))
        return (index >= 2 * row) & (index < slots - row) if kind == "ends" else (index != slots // 2) | (row == 0)
    if kind == "one_free":
        return index != draw
    if kind == "one_token":
        return index == draw
    full = torch.ones(shape, dtype=torch.bool, device=device)
    if kind == "empty_row":
        full[-1] = False
    elif kind not in ("full", "none"):
        raise ValueError(f"no such occupancy: {kind!r}")
    return full


def protection(kind: str, generator: torch.Generator, shape: tuple[int, ...]) -> Tensor | None:
    """Make a mask of protected slots, like `occupancy`. A protected slot may be unoccupied."""
    slots, device = shape[-1], generator.device
    index = torch.arange(slots, device=device).expand(shape)
    if kind == "none":
        return None
    if kind == "newest":
        return index == slots - 1
    if kind == "random":
        return torch.rand(shape, generator=generator, device=device) < 0.3
    if kind == "all_but_one":
        return index != torch.randint(slots, shape[:-1], generator=generator, device=device)[..., None]
    return torch.ones(shape, dtype=torch.bool, device=device)


def poison(kind: str, tensor: Tensor, occupied: Tensor) -> Tensor:
    """Overwrite the unoccupied slots of key or value [B, Hkv, S, D]."""
    fills = {"zero": 0.0, "nan": math.nan, "inf": math.inf, "largest": torch.finfo(tensor.dtype).max}
    if kind not in fills:
        return tensor
    mask = occupied if occupied.dim() == 3 else occupied[:, None]
    if tensor.dtype in FP8:
        code = torch.tensor(fills[kind]).to(tensor.dtype).view(torch.uint8).item()
        return tensor.view(torch.uint8).masked_fill(~mask[..., None], code).view(tensor.dtype)
    return tensor.masked_fill(~mask[..., None], fills[kind])
