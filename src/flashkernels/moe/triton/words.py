"""From words of 16 bits, which hold 2 weights of 8 or 4 of 4 bits, to numbers.

Two neighbouring words are one register on their way to the tensor cores. An instruction that takes the n-th weights out
of both makes the two neighbouring numbers that the tensor cores want in one register, too: nothing is shuffled. A
weight becomes a float without a conversion: set into the fraction of one whose last bit is worth 1 (128 in bf16, 1024
in fp16), it only needs a subtraction. Each *phase*, the n-th weights of all words, is a tile of its own: 64
neighbouring weights of a row (see `flashkernels.moe.weights`).
"""

from __future__ import annotations

import triton
import triton.language as tl

# Each takes the register of words after its outputs, the phases; `lop3 ..., 0xea` is (a & b) | c.
# bf16 has 7 bits of fraction. A weight of 8 is m - s, m its low seven bits and s 0 or 128: (128 + m) - (128 + s)
W8_BF16 = """
    .reg .b32 x, sign, less;
    mov.b32 less, 0xbf80bf80;
    lop3.b32 $0, $2, 0x007f007f, 0x43004300, 0xea;
    lop3.b32 sign, $2, 0x00800080, 0x43004300, 0xea;
    fma.rn.bf16x2 $0, sign, less, $0;
    shr.u32 x, $2, 8;
    lop3.b32 $1, x, 0x007f007f, 0x43004300, 0xea;
    lop3.b32 sign, x, 0x00800080, 0x43004300, 0xea;
    fma.rn.bf16x2 $1, sign, less, $1;
"""
# b ^ 128 in the fraction of 1024 is 1024 + 128 + b
W8_FP16 = """
    .reg .b32 x, less;
    mov.b32 less, 0x64806480;
    xor.b32 x, $2, 0x80808080;
    prmt.b32 $0, x, 0x64646464, 0x4240;
    prmt.b32 $1, x, 0x64646464, 0x4341;
    sub.f16x2 $0, $0, less;
    sub.f16x2 $1, $1, less;
"""
# weights of 4 bits are stored plus 8: 128 + 8 + n
W4_BF16 = """
    .reg .b32 x, one, less;
    mov.b32 one, 0x3f803f80;
    mov.b32 less, 0xc308c308;
    lop3.b32 $0, $4, 0x000f000f, 0x43004300, 0xea;
    shr.u32 x, $4, 4;
    lop3.b32 $1, x, 0x000f000f, 0x43004300, 0xea;
    shr.u32 x, $4, 8;
    lop3.b32 $2, x, 0x000f000f, 0x43004300, 0xea;
    shr.u32 x, $4, 12;
    lop3.b32 $3, x, 0x000f000f, 0x43004300, 0xea;
    fma.rn.bf16x2 $0, $0, one, less;
    fma.rn.bf16x2 $1, $1, one, less;
    fma.rn.bf16x2 $2, $2, one, less;
    fma.rn.bf16x2 $3, $3, one, less;
"""
# fp16 has 10 bits of fraction: four bits further up, 1024 + 16 * (8 + n) needs no shift
W4_FP16 = """
    .reg .b32 x, less, sixteenth, high;
    mov.b32 less, 0x64086408;
    mov.b32 sixteenth, 0x2c002c00;
    mov.b32 high, 0xd480d480;
    shr.u32 x, $4, 8;
    lop3.b32 $0, $4, 0x000f000f, 0x64006400, 0xea;
    lop3.b32 $1, $4, 0x00f000f0, 0x64006400, 0xea;
    lop3.b32 $2, x, 0x000f000f, 0x64006400, 0xea;
    lop3.b32 $3, x, 0x00f000f0, 0x64006400, 0xea;
    sub.f16x2 $0, $0, less;
    fma.rn.f16x2 $1, $1, sixteenth, high;
    sub.f16x2 $2, $2, less;
    fma.rn.f16x2 $3, $3, sixteenth, high;
"""
# A product in bf16 alone needs sm_90: one with a sum, -0, does not.
PRODUCTS = {
    "bf16": (".reg .b32 zero; mov.b32 zero, 0x80008000;", "fma.rn.bf16x2 ${0}, ${0}, ${1}, zero;"),
    "fp16": ("", "mul.f16x2 ${0}, ${0}, ${1};"),
}


def program(body: str, count: int, dtype: str = "") -> tl.constexpr:
    """The phases of a register of words; with a dtype times their scales, the inputs after the words."""
    before, product = PRODUCTS.get(dtype, ("", ""))
    after = [product.format(phase, count + 1 + phase) for phase in range(count)]
    return tl.constexpr("\n".join(["{", before, body, *after, "}"]))


PLAIN_W8_BF16, SCALED_W8_BF16 = program(W8_BF16, 2), program(W8_BF16, 2, "bf16")
PLAIN_W8_FP16, SCALED_W8_FP16 = program(W8_FP16, 2), program(W8_FP16, 2, "fp16")
PLAIN_W4_BF16, SCALED_W4_BF16 = program(W4_BF16, 4), program(W4_BF16, 4, "bf16")
PLAIN_W4_FP16, SCALED_W4_FP16 = program(W4_FP16, 4), program(W4_FP16, 4, "fp16")
# "&": phases are written while words and scales are still to be read
PLAIN_2, SCALED_2 = tl.constexpr("=&r,=&r,r"), tl.constexpr("=&r,=&r,r,r,r")
PLAIN_4, SCALED_4 = tl.constexpr("=&r,=&r,=&r,=&r,r"), tl.constexpr("=&r,=&r,=&r,=&r,r,r,r,r,r")


@triton.jit
def phases(words, scales, FORMAT: tl.constexpr, DTYPE: tl.constexpr, SCALED: tl.constexpr, NATIVE: tl.constexpr):
    """The tiles of numbers in a tile of words; where SCALED, each times its own of `scales`, columns of DTYPE. Triton's
    interpreter and fp32 take the plain way."""
    if NATIVE and FORMAT == "w4" and tl.bfloat16 == DTYPE:
        found = tl.inline_asm_elementwise(
            SCALED_W4_BF16 if SCALED else PLAIN_W4_BF16, SCALED_4 if SCALED else PLAIN_4, (words,) + scales,
            dtype=(tl.bfloat16, tl.bfloat16, tl.bfloat16, tl.bfloat16), is_pure=True, pack=2,
        )  # fmt: skip
    elif NATIVE and FORMAT == "w4" and tl.float16 == DTYPE:
        found = tl.inline_asm_elementwise(
            SCALED_W4_FP16 if SCALED else PLAIN_W4_FP16, SCALED_4 if SCALED else PLAIN_4, (words,) + scales,
            dtype=(tl.float16, tl.float16, tl.float16, tl.float16), is_pure=True, pack=2,
        )  # fmt: skip
    elif NATIVE and FORMAT == "w8" and tl.bfloat16 == DTYPE:
        found = tl.inline_asm_elementwise(
            SCALED_W8_BF16 if SCALED else PLAIN_W8_BF16, SCALED_2 if SCALED else PLAIN_2, (words,) + scales,
            dtype=(tl.bfloat16, tl.bfloat16), is_pure=True, pack=2,
        )  # fmt: skip
    elif NATIVE and FORMAT == "w8" and tl.float16 == DTYPE:
        found = tl.inline_asm_elementwise(
            SCALED_W8_FP16 if SCALED else PLAIN_W8_FP16, SCALED_2 if SCALED else PLAIN_2, (words,) + scales,
            dtype=(tl.float16, tl.float16), is_pure=True, pack=2,
        )  # fmt: skip
    else:
        found = ()
        for p in tl.static_range(4 if FORMAT == "w4" else 2):
            number = (words >> 4 * p & 15) - 8 if FORMAT == "w4" else words << 8 * (1 - p) >> 8
            found = found + (number.to(DTYPE) * scales[p] if SCALED else number.to(DTYPE),)
    return found
