"""The machine itself: its arithmetic against torch's, lanes that part and meet, and faults that it has to find."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Callable

import pytest
import torch
from tests.machine import machine, ptx
from torch import Tensor

PRELUDE = """
typedef unsigned char u8; typedef unsigned short u16; typedef unsigned int u32; typedef unsigned long long u64;
typedef long long i64;
extern __shared__ __align__(1024) char memory[];
__device__ u32 address(const void* p) { return (u32)__cvta_generic_to_shared(p); }
"""


def launch(
    body: str, *tensors: Tensor, grid: int = 1, threads: int = 32, shared: int = 1024, seed: int = 2, cluster: int = 1,
    before: str = "",
) -> None:  # fmt: skip
    """A kernel with this body, whose arguments are a, b, c, ...: pointers to the tensors' elements."""
    kinds = {torch.float32: "float", torch.int32: "int", torch.uint8: "u8", torch.int16: "u16", torch.int64: "i64"}
    arguments = ", ".join(f"{kinds[x.dtype]}* {name}" for name, x in zip("abcdefg", tensors, strict=False))
    source = (
        f'{PRELUDE}{before}\nextern "C" __global__ void kernel({arguments}) {{ const int t = threadIdx.x; {body} }}'
    )
    pointers = (ctypes.c_uint64 * max(1, len(tensors)))(*(x.data_ptr() for x in tensors))
    spans = [(x.data_ptr(), x.data_ptr() + x.nbytes) for x in tensors]
    machine.kernels(machine.compiled("test.cu", source, {}))["kernel"].run(
        grid, threads, ctypes.addressof(pointers), spans, dynamic=shared, seed=seed, cluster=cluster
    )


# Arithmetic

INTEGERS = torch.tensor(
    [0, 1, -1, 2, 7, -7, 31, 32, 33, 12345, -98765, 2**31 - 1, -(2**31), 0x00FF00FF], dtype=torch.int32
)


@pytest.mark.parametrize(
    ("expression", "python"),
    [
        ("x + y", lambda x, y: x + y),
        ("x * y", lambda x, y: x * y),
        ("y ? x / y : 5", lambda x, y: int(math.copysign(abs(x) // abs(y), x * y)) if y else 5),
        ("y ? x % y : 5", lambda x, y: int(math.copysign(abs(x) % abs(y), x)) if y else 5),
        ("y ? (int)((u32)x / (u32)y) : 5", lambda x, y: (x % 2**32) // (y % 2**32) if y else 5),
        ("__mulhi(x, y)", lambda x, y: x * y >> 32),
        ("(int)(((i64)x * y) >> 7)", lambda x, y: x * y >> 7),
        ("(int)((u64)(u32)x * (u32)y >> 33)", lambda x, y: (x % 2**32) * (y % 2**32) >> 33),
        ("min(x, y) ^ max(x, y)", lambda x, y: min(x, y) ^ max(x, y)),
        ("x >> (y & 31)", lambda x, y: x >> (y & 31)),
        ("(int)((u32)x >> (y & 31))", lambda x, y: (x % 2**32) >> (y & 31)),
        ("x << (y & 31)", lambda x, y: x << (y & 31)),
        ("__clz(x) + 100 * __popc(y)", lambda x, y: 32 - (x % 2**32).bit_length() + 100 * (y % 2**32).bit_count()),
        ("(int)__brev(x)", lambda x, y: int(f"{x % 2**32:032b}"[::-1], 2)),
        ("(int)__byte_perm(x, y, 0x5140)", lambda x, y: _permuted(x, y, 0x5140)),
        ("(x & y) | (~x & 12)", lambda x, y: (x & y) | (~x & 12)),
        ("(x < y) + 2 * ((u32)x < (u32)y) + 4 * (x == y)",
         lambda x, y: (x < y) + 2 * (x % 2**32 < y % 2**32) + 4 * (x == y)),
        ("(int)(short)x + (int)(signed char)y", lambda x, y: _signed(x, 16) + _signed(y, 8)),
    ],
)  # fmt: skip
def test_integers(expression: str, python: Callable[[int, int], int]) -> None:
    x, y = INTEGERS.repeat_interleave(len(INTEGERS)), INTEGERS.repeat(len(INTEGERS))
    pairs = torch.cat([x, x[: -len(x) % 32]]), torch.cat([y, y[: -len(y) % 32]])
    got = torch.empty_like(pairs[0])
    launch(f"const int x = a[t], y = b[t]; c[t] = {expression};", *pairs, got, threads=len(got))
    want = [_signed(python(int(i), int(j)), 32) for i, j in zip(*pairs, strict=True)]
    assert got.tolist() == want


def _signed(x: int, width: int) -> int:
    return (x + 2 ** (width - 1)) % 2**width - 2 ** (width - 1)


def _permuted(x: int, y: int, selector: int) -> int:
    both = (x % 2**32 | y % 2**32 << 32).to_bytes(8, "little")
    return int.from_bytes(bytes(both[selector >> 4 * i & 7] for i in range(4)), "little")


FLOATS = torch.tensor(
    [0.0, -0.0, 1.0, -1.5, 3.25, 1e-40, 1e30, -1e30, 65504.0, 0.1, 448.0, 470.0, math.inf, -math.inf, math.nan, 7e-3]
)


@pytest.mark.parametrize(
    ("expression", "torch_of"),
    [
        ("x + y", lambda x, y: x + y),
        ("x * y", lambda x, y: x * y),
        ("fmaf(x, y, -x * y)", lambda x, y: (x.double() * y.double() - (x * y).double()).float()),
        ("fmaxf(x, y)", lambda x, y: torch.fmax(x, y)),
        ("fminf(x, y)", lambda x, y: torch.fmin(x, y)),
        ("fabsf(x) - y", lambda x, y: x.abs() - y),
        ("ceilf(x) + floorf(y)", lambda x, y: x.ceil() + y.floor()),
        ("rintf(x)", lambda x, y: x.round()),
        ("(float)(x < y) + 2 * (x == y) + 4 * !(x >= y) + 8 * (x != y)",
         lambda x, y: (x < y) + 2.0 * (x == y) + 4 * ~(x >= y) + 8 * (x != y)),
        ("(float)(int)fminf(fmaxf(x, -1e6f), 1e6f)",
         lambda x, y: x.fmax(torch.tensor(-1e6)).fmin(torch.tensor(1e6)).trunc()),
        ("__int_as_float(__float_as_int(x) ^ 0x80000000)", lambda x, y: -x),
    ],
)  # fmt: skip
def test_floats(expression: str, torch_of: Callable[[Tensor, Tensor], Tensor]) -> None:
    x, y = FLOATS.repeat_interleave(len(FLOATS)), FLOATS.repeat(len(FLOATS))
    got = torch.empty_like(x)
    launch(f"const float x = a[t], y = b[t]; c[t] = {expression};", x, y, got, threads=len(x))
    torch.testing.assert_close(got, torch_of(x, y).float(), rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize(
    ("instruction", "function", "near"),
    [
        ("ex2.approx.ftz.f32", torch.exp2, 1e-6),
        ("lg2.approx.ftz.f32", torch.log2, 1e-6),
        ("rcp.approx.ftz.f32", torch.reciprocal, 1e-6),
        ("tanh.approx.f32", torch.tanh, 1e-6),
    ],
)
def test_functions(instruction: str, function: Callable[[Tensor], Tensor], near: float) -> None:
    x = torch.linspace(0.01, 20, 256)
    got = torch.empty_like(x)
    launch(f'asm("{instruction} %0, %1;" : "=f"(b[t]) : "f"(a[t]));', x, got, threads=256)
    torch.testing.assert_close(got, function(x), rtol=near, atol=near)


@pytest.mark.parametrize(
    ("instruction", "dtype"),
    [("cvt.rn.bf16x2.f32 %0, %1, %2;", torch.bfloat16), ("cvt.rn.f16x2.f32 %0, %1, %2;", torch.float16)],
    ids=["bf16", "fp16"],
)
def test_rounding_to_16_bits(instruction: str, dtype: torch.dtype) -> None:
    x = torch.cat([torch.randn(400), torch.randn(400) * 1e-7, torch.randn(224) * 1e5]).nan_to_num(0)
    got = torch.empty(512, dtype=torch.int32)
    launch(f'asm("{instruction}" : "=r"(b[t]) : "f"(a[2 * t + 1]), "f"(a[2 * t]));', x, got, threads=512)
    assert torch.equal(got.view(dtype), x.to(dtype))


def test_rounding_to_8_bits() -> None:
    """To e4m3 and back, of every value and all that lie between two of them."""
    exact = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    exact = exact[exact.isfinite()].sort().values
    between = torch.cat([exact, (exact[1:] + exact[:-1]) / 2, exact * 1.01, exact * 0.97])
    x = torch.cat([between, torch.zeros(-len(between) % 64)])
    got, back = torch.empty(len(x) // 2, dtype=torch.int16), torch.empty(len(x) // 2, dtype=torch.int32)
    launch(
        'u16 r; asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(r) : "f"(a[2 * t + 1]), "f"(a[2 * t])); b[t] = r;'
        'asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(c[t]) : "h"(r));',
        x, got, back, threads=len(x) // 2,
    )  # fmt: skip
    want = x.clamp(-448, 448).to(torch.float8_e4m3fn)
    assert torch.equal(got.view(torch.float8_e4m3fn).float(), want.float())
    assert torch.equal(back.view(torch.float16).float(), want.float())


# Lanes


def test_lanes_part_and_meet() -> None:
    got = torch.empty(64, dtype=torch.int32)
    body = """
    int x = 0;
    for (int i = 0; i < t % 7; i++) x += i % 2 ? 10 : __popc(__activemask()) > 0;
    if (t & 1) x += 1000; else if (t & 2) x += 2000;
    a[t] = x + 100000 * (__shfl_xor_sync(~0u, t, 5) == (t ^ 5));
    """
    launch(body.replace("__popc(__activemask()) > 0", "1"), got, threads=64)
    want = [sum(10 if i % 2 else 1 for i in range(t % 7)) + (1000 if t & 1 else 2000 if t & 2 else 0) + 100000
            for t in range(64)]  # fmt: skip
    assert got.tolist() == want


def test_shuffles_and_votes() -> None:
    got = torch.empty(5, 32, dtype=torch.int32)
    launch(
        """
        a[t] = __shfl_sync(~0u, t * t, 5);
        a[32 + t] = __shfl_up_sync(~0u, t, 3);
        a[64 + t] = __shfl_down_sync(~0u, t, 3, 8);
        a[96 + t] = __ballot_sync(~0u, t % 3 == 0);
        a[128 + t] = __any_sync(~0u, t == 40) + 2 * __all_sync(~0u, t < 40);
        """,
        got,
    )  # fmt: skip
    lanes = range(32)
    assert got[0].tolist() == [25] * 32
    assert got[1].tolist() == [max(t - 3, t if t < 3 else 0) for t in lanes]
    assert got[2].tolist() == [t + 3 if t % 8 + 3 < 8 else t for t in lanes]
    assert got[3].tolist() == [_signed(sum(1 << t for t in lanes if t % 3 == 0), 32)] * 32
    assert got[4].tolist() == [2] * 32


def test_lanes_that_wait_for_one_another_in_vain_are_named() -> None:
    """At two instructions: neither has all lanes that it names."""
    with pytest.raises(machine.KernelFault, match=r"all warps wait:[^$]*lanes 0000ffff[^$]*other lanes"):
        launch(
            "a[t] = t < 16 ? __shfl_sync(~0u, t, 0) : __ballot_sync(~0u, t & 1);", torch.zeros(32, dtype=torch.int32)
        )


# Matrices


def test_matrices_to_shared_memory_and_back() -> None:
    """`stmatrix`, `ldmatrix` and their turned kin move 8 x 8 elements as their shapes say."""
    words = torch.arange(128, dtype=torch.int32).view(4, 32) * 65537 + (1 << 16)
    for trans in ("", ".trans"):
        got = torch.empty_like(words)
        launch(
            f"""
            const u32 row = address(memory) + t * 16;
            asm volatile("stmatrix.sync.aligned.m8n8.x4{trans}.shared.b16 [%0], {{%1, %2, %3, %4}};"
              :: "r"(row), "r"(a[t]), "r"(a[32 + t]), "r"(a[64 + t]), "r"(a[96 + t]) : "memory");
            asm volatile("ldmatrix.sync.aligned.m8n8.x4{trans}.shared.b16 {{%0, %1, %2, %3}}, [%4];"
              : "=r"(b[t]), "=r"(b[32 + t]), "=r"(b[64 + t]), "=r"(b[96 + t]) : "r"(row) : "memory");
            """,
            words.flatten(), got.view(-1),
        )  # fmt: skip
        assert torch.equal(got, words)
    turned, twice = torch.empty(32, dtype=torch.int32), torch.empty(32, dtype=torch.int32)
    launch('asm("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(b[t]) : "r"(a[t]));'
           'asm("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(c[t]) : "r"(b[t]));',
           words[0].clone(), turned, twice)  # fmt: skip
    assert torch.equal(turned.view(torch.int16).view(8, 8), words[0].clone().view(torch.int16).view(8, 8).T)
    assert torch.equal(twice, words[0])


# Faults


def test_memory_that_is_nobodys() -> None:
    with pytest.raises(machine.KernelFault, match=r"4 bytes at [0-9a-f]+ belong to no tensor[^$]*lane 31[^$]*test.cu"):
        launch("a[t + 1] = 3;", torch.zeros(32, dtype=torch.int32))
    with pytest.raises(machine.KernelFault, match="4 bytes at 1024 of shared memory, which has 1024"):
        launch("((int*)memory)[a[0] + t] = t;", torch.full((1,), 256, dtype=torch.int32))


HAND_OVER = """
int* place = (int*)memory;
if (t < 32) place[t] = t;
%s
if (t >= 32) a[t - 32] = place[63 - t];
"""


@pytest.mark.parametrize("seed", [0, 1, 2, 5])
def test_a_barrier_makes_a_write_known(seed: int) -> None:
    got = torch.empty(32, dtype=torch.int32)
    launch(HAND_OVER % "__syncthreads();", got, threads=64, seed=seed)
    assert got.tolist() == [*range(31, -1, -1)]


@pytest.mark.parametrize("seed", [0, 1, 2, 5])
def test_a_read_without_a_barrier_is_a_race(seed: int) -> None:
    """Whatever order the warps have taken."""
    with pytest.raises(machine.KernelFault, match=r"race: word [0-9]+ of shared memory is (read|written|overwritten)"):
        launch(HAND_OVER % "", torch.empty(32, dtype=torch.int32), threads=64, seed=seed)


def test_a_barrier_that_not_all_reach() -> None:
    with pytest.raises(machine.KernelFault, match=r"all warps wait:[^$]*a named barrier 3"):
        launch('if (t < 32) asm volatile("bar.sync 3, 64;" ::: "memory");', threads=64)


def test_an_instruction_without_meaning_is_refused() -> None:
    with pytest.raises(ptx.UnknownInstruction, match="no meaning for"):
        launch('asm volatile("trap;"); a[t] = 1;', torch.zeros(32, dtype=torch.int32))
