"""From stored bits to numbers of 16 bits, several at a time: what keeps a quantised cache at the speed of memory.

Bytes are read in words of 16 bits, so that the instruction which transposes values on their way to the tensor cores
takes them; a word holds 2 neighbouring columns (INT4: 4). Each *phase* of a word becomes a tile of its own: the first
columns of all words, then the second. Their products are added, or are columns of the output; nothing is shuffled.

An integer becomes a float without a conversion instruction: put into the low bits of a float whose last bit is worth 1
(1024 in fp16), it only needs a subtraction. The interpreter and fp32 take the plain way.
"""

from __future__ import annotations

import triton
import triton.language as tl

# Each takes two words in one register, and gives each phase of the two in one register.
# b ^ 128 in the low bits of 1024 is 1024 + 128 + b
INT8 = tl.constexpr("""{
    .reg .b32 x, one;
    xor.b32 x, $2, 0x80808080;
    mov.b32 one, 0x64806480;
    prmt.b32 $0, x, 0x64646464, 0x4240;
    prmt.b32 $1, x, 0x64646464, 0x4341;
    sub.f16x2 $0, $0, one;
    sub.f16x2 $1, $1, one;
}""")
# n ^ 8 in the low bits of 1024 is 1024 + 8 + n, four bits further up 1024 + 16 * (8 + n)
INT4 = tl.constexpr("""{
    .reg .b32 x, y, one, sixteenth, two;
    xor.b32 x, $4, 0x88888888;
    shr.u32 y, x, 8;
    mov.b32 one, 0x64086408;
    mov.b32 sixteenth, 0x2c002c00;
    mov.b32 two, 0xd480d480;
    lop3.b32 $0, x, 0x000f000f, 0x64006400, 0xea;
    lop3.b32 $1, x, 0x00f000f0, 0x64006400, 0xea;
    lop3.b32 $2, y, 0x000f000f, 0x64006400, 0xea;
    lop3.b32 $3, y, 0x00f000f0, 0x64006400, 0xea;
    sub.f16x2 $0, $0, one;
    fma.rn.f16x2 $1, $1, sixteenth, two;
    sub.f16x2 $2, $2, one;
    fma.rn.f16x2 $3, $3, sixteenth, two;
}""")
E4M3 = tl.constexpr("""{
    .reg .b32 x;
    .reg .b16 even, odd;
    prmt.b32 x, $2, 0, 0x3120;
    mov.b32 {even, odd}, x;
    cvt.rn.f16x2.e4m3x2 $0, even;
    cvt.rn.f16x2.e4m3x2 $1, odd;
}""")
# e5m2 is the upper half of fp16
E5M2 = tl.constexpr("""{
    .reg .b32 x;
    mov.b32 x, $2;
    prmt.b32 $0, x, 0, 0x2404;
    and.b32 $1, x, 0xff00ff00;
}""")


@triton.jit
def of_byte(x, KIND: tl.constexpr, DTYPE: tl.constexpr):
    """The numbers of bytes 0 to 255 (int16), by plain arithmetic. INT4: see `of_nibble`."""
    if KIND == "int8":
        y = (x.to(tl.int16) << 8 >> 8).to(DTYPE)
    elif KIND == "fp8":  # e4m3 has one exponent bit less than fp16, and NaN where fp16 has 1.875 * 2**0
        half = (((x & 128) << 8) | ((x & 127) << 7)).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32) * 256
        y = tl.where((x & 127) == 127, float("nan"), half).to(DTYPE)
    else:
        y = (x << 8).to(tl.int16).to(tl.float16, bitcast=True).to(DTYPE)
    return y


@triton.jit
def of_nibble(x, DTYPE: tl.constexpr):
    return ((x & 15 ^ 8) - 8).to(DTYPE)


@triton.jit
def phases(x, KIND: tl.constexpr, PAIRS: tl.constexpr, DTYPE: tl.constexpr, NATIVE: tl.constexpr):
    """The tiles that a tile of stored elements holds, in the order of their columns. Elements are words where PAIRS,
    else bytes (an odd number of them in a row), or the numbers themselves."""
    if KIND == "plain":
        found = (x,)
    elif NATIVE and PAIRS and tl.float16 == DTYPE:
        if KIND == "int4":
            found = tl.inline_asm_elementwise(
                INT4, "=r,=r,=r,=r,r", [x], dtype=(tl.float16, tl.float16, tl.float16, tl.float16), is_pure=True, pack=2
            )  # fmt: skip
        else:
            code: tl.constexpr = INT8 if KIND == "int8" else E4M3 if KIND == "fp8" else E5M2
            found = tl.inline_asm_elementwise(
                code, "=r,=r,r", [x], dtype=(tl.float16, tl.float16), is_pure=True, pack=2
            )  # fmt: skip
    else:
        bits = x.to(tl.int16)
        if KIND == "int4":
            found = (of_nibble(bits, DTYPE), of_nibble(bits >> 4, DTYPE))
            if PAIRS:
                found = found + (of_nibble(bits >> 8, DTYPE), of_nibble(bits >> 12, DTYPE))
        else:
            found = (of_byte(bits & 255, KIND, DTYPE),)
            if PAIRS:
                found = found + (of_byte(bits >> 8 & 255, KIND, DTYPE),)
    return found
