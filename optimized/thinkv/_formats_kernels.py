"""Device functions of ThinKV's number formats, for all kernels that quantize or read quantized tokens.

A code is sign << (bits - 1) | index of a magnitude, int32 in registers. Every result is exact or correctly rounded, so
that compiled kernels and the interpreter return the same bits. E4M3 is computed with integers (and one addition to a
power of two), since casts to float8 are wrong in the interpreter. The magnitude nearest to |x| / scale is found without
a division, by comparing |x| with the scale times numbers of four bits, which is exact. Necessary divisions use
`divided`. No addition follows a multiplication if fusing them would change the result.

FORMAT is "fp8", "nvfp4", "ternary", "int4" or "int2". Ternary and int2 differ only in their scale rules.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .._common.numerics import divided, float32, round_to, without_sign_of_zero

_FLOAT32_LARGEST = tl.constexpr(0x7F7FFFFF)
_INFINITY = tl.constexpr(0x7F800000)


# Scales --------------------------------------------------------------------------------------------------------------


@triton.jit
def magnitude(x):
    """|x| of float32; 0 for NaN, the largest float32 for infinity."""
    bits = x.to(tl.int32, bitcast=True) & 0x7FFFFFFF
    bits = tl.where(bits > _INFINITY, 0, tl.minimum(bits, _FLOAT32_LARGEST))
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def encode_e4m3(x):
    """The E4M3 code, int32, of float32 x >= 0 (not NaN), rounded to nearest even, at most 448."""
    bits = tl.minimum(x.to(tl.int32, bitcast=True), 0x43E00000)
    normal = ((bits + 0x7FFFF + ((bits >> 20) & 1)) >> 20) - 960
    # Below 2^-6 codes are multiples of 2^-9, float32's resolution at 2^14. Integer operations in between avoid fusion.
    small = (bits.to(tl.float32, bitcast=True) + 16384.0).to(tl.int32, bitcast=True) - 0x46800000
    return tl.where(bits < 0x3C800000, small, normal)


@triton.jit
def decode_scale(code):
    """The float32 value of an E4M3 code from `encode_e4m3` (0 to 126). Exact: the shifted bits are 2^-120 times it."""
    return (code.to(tl.int32) << 20).to(tl.float32, bitcast=True) * 1.329227995784916e36


@triton.jit
def decode_e4m3(code):
    """The float32 value of any E4M3 code, 0 to 255, with sign and NaN."""
    code = code.to(tl.int32)
    value = tl.where((code & 127) == 127, float("nan"), decode_scale(code & 127))
    # Sets the sign bit, because some interpreters compute -x as 0 - x, which is +0 for 0.
    return (value.to(tl.int32, bitcast=True) | ((code & 128) << 24)).to(tl.float32, bitcast=True)


@triton.jit
def scale_code(amax, FORMAT: tl.constexpr):
    """The code of a group's scale, for formats with E4M3 scales; for ternary by the rule "amax"."""
    if FORMAT == "nvfp4":
        return encode_e4m3(divided(amax, 6.0))
    elif FORMAT == "int4":
        return encode_e4m3(divided(amax, 7.0))
    else:
        return encode_e4m3(amax)


@triton.jit
def fp8_scale(amax):
    """The float32 scale of an fp8 chunk."""
    return divided(amax, 448.0)


# Codes ---------------------------------------------------------------------------------------------------------------


@triton.jit
def _index_e2m1(a, s):
    """The index of the E2M1 magnitude nearest to a / s, ties to the even index. s > 0 must have few enough bits."""
    high = a >= s * 1.75
    middle = a >= s * tl.where(high, 3.5, 0.75)
    low = a > s * tl.where(high, tl.where(middle, 5.0, 2.5), tl.where(middle, 1.25, 0.25))
    return high.to(tl.int32) * 4 + middle.to(tl.int32) * 2 + low.to(tl.int32)


@triton.jit
def _index_int4(a, s):
    """As `_index_e2m1`, for the magnitudes 0 to 7."""
    high = a >= s * 3.5
    middle = a >= s * tl.where(high, 5.5, 1.5)
    low = a > s * tl.where(high, tl.where(middle, 6.5, 4.5), tl.where(middle, 2.5, 0.5))
    return high.to(tl.int32) * 4 + middle.to(tl.int32) * 2 + low.to(tl.int32)


@triton.jit
def _signed(index, x, SIGN: tl.constexpr):
    return tl.where((x < 0.0) & (index > 0), index + SIGN, index)


@triton.jit
def encode(x, scale, FORMAT: tl.constexpr, DIVIDES: tl.constexpr = False):
    """The codes, int32, of float32 x in groups with the given scale, which broadcasts against x; 0 where it is 0.

    Scales are E4M3 numbers, except for fp8; for nvfp4 with DIVIDES, they can be any float32.
    """
    a = magnitude(x)
    positive = scale > 0.0
    if FORMAT == "fp8":
        index = encode_e4m3(divided(a, tl.where(positive, scale, 1.0)))
        return _signed(tl.where(positive, index, 0), x, 128)
    elif FORMAT == "nvfp4":
        if DIVIDES:
            index = _index_e2m1(divided(a, tl.where(positive, scale, 1.0)), 1.0)
        else:
            index = _index_e2m1(a, scale)
        return _signed(tl.where(positive, index, 0), x, 8)
    elif FORMAT == "int4":
        return _signed(tl.where(positive, _index_int4(a, scale), 0), x, 8)
    else:
        return _signed((positive & (a > scale * 0.5)).to(tl.int32), x, 2)


@triton.jit
def decode(code, FORMAT: tl.constexpr):
    """The values of int32 codes without their scale, float32. Codes from `encode` have no -0; others may."""
    if FORMAT == "fp8":
        return decode_e4m3(code)
    elif FORMAT == "nvfp4":
        # The code's exponent and mantissa bits in a float32 are 2^-126 times its value.
        bits = ((code & 7) << 22) | ((code & 8) << 28)
        return bits.to(tl.float32, bitcast=True) * 8.507059173023462e37
    elif FORMAT == "int4":
        value = (code & 7).to(tl.float32)
        return tl.where((code & 8) != 0, -value, value)
    else:
        value = (code & 1).to(tl.float32)
        return tl.where((code & 2) != 0, -value, value)


# Tensors -------------------------------------------------------------------------------------------------------------
# x is [A, B, T, D] with any strides, row = a * B + b; codes, scales and packed bytes are contiguous.

_X = ["rows_b", "tokens", "channels", "groups", "x_a", "x_b", "x_t", "x_d"]


@triton.jit
def _load(x, row, rows_b, token, channel, mask, x_a, x_b, x_t, x_d):
    """Elements of x in float32, 0 where masked."""
    a, b = (row // rows_b).to(tl.int64), (row % rows_b).to(tl.int64)
    at = a * x_a + b * x_b + token.to(tl.int64) * x_t + channel.to(tl.int64) * x_d
    return float32(tl.load(x + at, mask=mask, other=0.0))


@triton.jit(do_not_specialize=[*_X, "tiles"])
def largest_kernel(
    x, result, rows_b, tokens, channels, groups, x_a, x_b, x_t, x_d, tiles, TOKENS: tl.constexpr, BLOCK: tl.constexpr
):
    """The largest magnitude in x, as the bits of a float32, in result [1] int32, which must be 0 before."""
    row, tile = tl.program_id(0) // tiles, tl.program_id(0) % tiles
    token = tile * TOKENS + tl.arange(0, TOKENS)[:, None]
    most = tl.zeros([TOKENS, BLOCK], tl.float32)
    for start in range(0, channels, BLOCK):
        channel = start + tl.arange(0, BLOCK)[None, :]
        inside = (token < tokens) & (channel < channels)
        most = tl.maximum(most, magnitude(_load(x, row, rows_b, token, channel, inside, x_a, x_b, x_t, x_d)))
    tl.atomic_max(result, tl.max(tl.max(most, 1), 0).to(tl.int32, bitcast=True))


@triton.jit(do_not_specialize=[*_X, "tiles"])
def quantize_kernel(
    x, codes, scales, largest, second, rows_b, tokens, channels, groups, x_a, x_b, x_t, x_d, tiles,
    FORMAT: tl.constexpr, AXIS: tl.constexpr, RULE: tl.constexpr, TENSOR: tl.constexpr, GROUP: tl.constexpr,
    GROUP_PAD: tl.constexpr, BLOCK: tl.constexpr,
):
    """Program: BLOCK groups of a row, all formats except fp8. `groups`: along the axis; largest, second: for TENSOR."""
    row, tile = tl.program_id(0) // tiles, tl.program_id(0) % tiles
    i = tl.arange(0, GROUP_PAD)[None, :]
    if AXIS == -1:
        unit = tile * BLOCK + tl.arange(0, BLOCK)                              # groups token by token
        token, first = (unit // groups)[:, None], (unit % groups * GROUP)[:, None]
        valid = unit < tokens * groups
        scale_at = row.to(tl.int64) * tokens * groups + unit
        channel = first + i
    else:
        per_chunk = tl.cdiv(channels, BLOCK)
        chunk, lane = tile // per_chunk, tile % per_chunk * BLOCK + tl.arange(0, BLOCK)
        valid = lane < channels
        scale_at = (row.to(tl.int64) * groups + chunk) * channels + lane
        token, channel = chunk * GROUP + i, lane[:, None]
    inside = valid[:, None] & (i < GROUP) & (token < tokens) & (channel < channels)
    y = _load(x, row, rows_b, token, channel, inside, x_a, x_b, x_t, x_d)
    amax = tl.max(magnitude(y), 1)
    if TENSOR:
        unit_scale = divided(tl.load(largest).to(tl.float32, bitcast=True), 2688.0)
        if tl.program_id(0) == 0:
            tl.store(second, unit_scale)
        some = unit_scale > 0.0
        code = encode_e4m3(tl.where(some, divided(amax, tl.where(some, unit_scale * 6.0, 1.0)), 0.0))
        scale = decode_scale(code) * unit_scale
    elif RULE == "mse":
        code = tl.zeros([BLOCK], tl.int32)
        least = tl.full([BLOCK], float("inf"), tl.float64)
        for k in tl.static_range(16, 7, -1):
            candidate = encode_e4m3(amax * (k / 16))
            step = decode_scale(candidate)
            error = tl.zeros([BLOCK], tl.float64)
            for n in range(GROUP):
                if AXIS == -1:
                    there, place = unit // groups, unit % groups * GROUP + n
                    one = _load(x, row, rows_b, there, place, valid & (place < channels), x_a, x_b, x_t, x_d)
                else:
                    there = chunk * GROUP + n + tl.zeros([BLOCK], tl.int32)
                    one = _load(x, row, rows_b, there, lane, valid & (there < tokens), x_a, x_b, x_t, x_d)
                one = magnitude(one)
                off = (one - tl.where(one > step * 0.5, step, 0.0)).to(tl.float64)
                error += off * off                                             # exact, fused or not
            better = error < least
            code, least = tl.where(better, candidate, code), tl.where(better, error, least)
        scale = decode_scale(code)
    else:
        code = scale_code(amax, FORMAT)
        scale = decode_scale(code)
    tl.store(scales + scale_at, code.to(tl.uint8), mask=valid)
    at = (row.to(tl.int64) * tokens + token) * channels + channel
    tl.store(codes + at, encode(y, scale[:, None], FORMAT, TENSOR).to(tl.uint8), mask=inside)


@triton.jit(do_not_specialize=_X)
def quantize_fp8_kernel(
    x, codes, scales, rows_b, tokens, channels, groups, x_a, x_b, x_t, x_d,
    GROUP: tl.constexpr, GROUP_PAD: tl.constexpr, BLOCK: tl.constexpr,
):
    """Program: a chunk of GROUP tokens with all channels, BLOCK at a time."""
    row, chunk = tl.program_id(0) // groups, tl.program_id(0) % groups
    i = tl.arange(0, GROUP_PAD)[:, None]
    token = chunk * GROUP + i
    valid = (i < GROUP) & (token < tokens)
    most = tl.zeros([GROUP_PAD, BLOCK], tl.float32)
    for start in range(0, channels, BLOCK):
        channel = start + tl.arange(0, BLOCK)[None, :]
        y = _load(x, row, rows_b, token, channel, valid & (channel < channels), x_a, x_b, x_t, x_d)
        most = tl.maximum(most, magnitude(y))
    scale = fp8_scale(tl.max(tl.max(most, 1), 0))
    tl.store(scales + tl.program_id(0), scale)
    for start in range(0, channels, BLOCK):
        channel = start + tl.arange(0, BLOCK)[None, :]
        inside = valid & (channel < channels)
        y = _load(x, row, rows_b, token, channel, inside, x_a, x_b, x_t, x_d)
        at = (row.to(tl.int64) * tokens + token) * channels + channel
        tl.store(codes + at, encode(y, scale, "fp8").to(tl.uint8), mask=inside)


@triton.jit(do_not_specialize=["rows", "tokens", "channels", "groups"])
def dequantize_kernel(
    codes, scales, second, result, rows, tokens, channels, groups,
    FORMAT: tl.constexpr, AXIS: tl.constexpr, TENSOR: tl.constexpr, GROUP: tl.constexpr,
    TOKENS: tl.constexpr, BLOCK: tl.constexpr,
):
    """Program: TOKENS tokens (of all rows) and BLOCK channels of [rows, T, D]."""
    blocks = tl.cdiv(channels, BLOCK)
    line = (tl.program_id(0) // blocks).to(tl.int64) * TOKENS + tl.arange(0, TOKENS)[:, None]
    channel = tl.program_id(0) % blocks * BLOCK + tl.arange(0, BLOCK)[None, :]
    inside = (line < rows.to(tl.int64) * tokens) & (channel < channels)
    row, token = line // tokens, line % tokens
    if FORMAT == "fp8":
        scale = tl.load(scales + row * groups + token // GROUP, mask=line < rows.to(tl.int64) * tokens, other=0.0)
    elif AXIS == -1:
        scale = decode_e4m3(tl.load(scales + line * groups + channel // GROUP, mask=inside, other=0))
    else:
        at = (row * groups + token // GROUP) * channels + channel
        scale = decode_e4m3(tl.load(scales + at, mask=inside, other=0))
    if TENSOR:
        scale *= tl.load(second)
    code = tl.load(codes + line * channels + channel, mask=inside, other=0).to(tl.int32)
    value = without_sign_of_zero(decode(code, FORMAT) * scale)
    tl.store(result + line * channels + channel, round_to(value, result.dtype.element_ty), mask=inside)


# Bytes ---------------------------------------------------------------------------------------------------------------


@triton.jit(do_not_specialize=["size", "width", "count"])
def pack_kernel(codes, packed, size, width, count, BITS: tl.constexpr, BLOCK: tl.constexpr):
    """Program: BLOCK of the `count` bytes in rows of `width` bytes, which hold `size` codes each."""
    byte = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    first = byte % width * (8 // BITS)
    result = tl.zeros([BLOCK], tl.int32)
    for n in tl.static_range(8 // BITS):
        valid = (byte < count) & (first + n < size)
        code = tl.load(codes + byte // width * size + first + n, mask=valid, other=0).to(tl.int32)
        result |= (code & ((1 << BITS) - 1)) << (n * BITS)
    tl.store(packed + byte, result.to(tl.uint8), mask=byte < count)


@triton.jit(do_not_specialize=["size", "width", "count"])
def unpack_kernel(packed, codes, size, width, count, BITS: tl.constexpr, BLOCK: tl.constexpr):
    """Program: BLOCK of the `count` codes in rows of `size` codes, which take `width` bytes each."""
    place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    within = place % size
    byte = tl.load(packed + place // size * width + within // (8 // BITS), mask=place < count, other=0).to(tl.int32)
    code = (byte >> (within % (8 // BITS) * BITS).to(tl.int32)) & ((1 << BITS) - 1)
    tl.store(codes + place, code.to(tl.uint8), mask=place < count)
