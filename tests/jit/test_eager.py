"""Prepared calls: what makes one call another kind than the last, who has to see it, threads and bounds."""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

import flashkernels as fk
from flashkernels.jit import eager
from flashkernels.jit.eager import Plans, kind_of, room, watched


class Made:
    """Plans that return the number of the preparation that served."""

    def __init__(self) -> None:
        self.kinds: list[tuple[Any, ...]] = []
        self.plans = Plans(self.make)

    def make(self, tensors: tuple[Any, ...], settings: tuple[Any, ...]) -> Callable[..., int]:
        self.kinds.append((tensors, settings))
        number = len(self.kinds)
        return lambda *tensors: number

    def __call__(self, *tensors: Any, settings: tuple[Any, ...] = (1.0, "auto")) -> int | None:
        run = self.plans.ready(tensors, settings)
        return None if run is None else run(*tensors)


@pytest.fixture
def made() -> Made:
    return Made()


def plain(*shape: int) -> Tensor:
    return torch.zeros(*shape or (4, 8))


def at_once(call: Callable[[int], None]) -> None:
    """call(0) to call(3), in a thread each."""
    threads = [threading.Thread(target=call, args=(n,)) for n in range(4)]
    for one in threads:
        one.start()
    for one in threads:
        one.join()


def moved(x: Tensor, elements: int) -> Tensor:
    """x at an address that is so many elements past a multiple of 16 bytes."""
    return torch.zeros(x.numel() + 16)[elements : elements + x.numel()].view(x.shape)


OTHERS: dict[str, Callable[[], Tensor]] = {
    "shape": lambda: plain(4, 9),
    "rank": lambda: plain(1, 4, 8),
    "strides": lambda: plain(8, 4).T,
    "a stride of one row": lambda: plain(4, 16)[:, :8],
    "dtype": lambda: plain().half(),
    "alignment": lambda: moved(plain(), 1),
    "parameter": lambda: torch.nn.Parameter(plain(), requires_grad=False),
}


@pytest.mark.parametrize("other", OTHERS)
def test_another_kind_of_tensor_is_prepared_for_itself(made: Made, other: str) -> None:
    changed = OTHERS[other]()
    assert [made(plain()), made(changed), made(plain()), made(changed)] == [1, 2, 1, 2]


@pytest.mark.parametrize("settings", [(1, "auto"), (True, "auto"), (2.0, "auto"), (1.0, "torch"), (1.0, "auto", None)])
def test_another_setting_is_prepared_for_itself(made: Made, settings: tuple[Any, ...]) -> None:
    """1, 1.0 and True are equal, but not equally valid."""
    assert [made(plain()), made(plain(), settings=settings), made(plain())] == [1, 2, 1]


def test_which_tensors_are_missing_is_part_of_the_kind(made: Made) -> None:
    x, y = plain(), plain(8)
    calls = [(x, y, None), (x, None, y), (x, None, None), (x, y, y)]
    assert [made(*call) for call in calls * 2] == [1, 2, 3, 4] * 2


def test_calls_of_a_kind_share_what_is_prepared(made: Made) -> None:
    assert [made(plain(), plain(8)) for _ in range(5)] == [1] * 5
    assert made(moved(plain(), 4), plain(8)) == 1  # 16 bytes further


@pytest.mark.parametrize("elements", [1, 2, 3])
def test_an_address_that_is_not_aligned_is_never_taken_for_one_that_is(made: Made, elements: int) -> None:
    assert [made(plain()), made(moved(plain(), elements)), made(plain())] == [1, 2, 1]


def test_devices_are_told_apart() -> None:
    """A call on the second GPU must not find what the first one's tensors prepared."""

    class Posed:
        shape, dtype, requires_grad = (4, 8), torch.float32, False

        def __init__(self, device: str) -> None:
            self.device = torch.device(device)

        def stride(self) -> tuple[int, ...]:
            return (8, 1)

        def data_ptr(self) -> int:
            return 0

    kinds = {kind_of((Posed(device),), ()) for device in ("cpu", "cuda:0", "cuda:1", "cuda:0")}
    assert len(kinds) == 3


def test_what_autograd_follows_is_left_to_torch_while_it_does(made: Made) -> None:
    x = plain()
    leaf = plain().requires_grad_()
    assert made(x) == 1 and made(leaf) is None and len(made.kinds) == 1
    with torch.no_grad():
        assert made(leaf) == 1  # of the same kind, where nobody follows
    assert made(leaf) is None and made(x) == 1
    with torch.inference_mode():
        assert made(plain()) == 1 and made(leaf) == 1


def test_a_mode_that_stays_costs_one_look_up(made: Made, monkeypatch: pytest.MonkeyPatch) -> None:
    looked: list[int] = []
    monkeypatch.setattr(eager, "kind_of", lambda *kind: looked.append(1) or kind_of(*kind))
    x = plain()
    for scope in (torch.no_grad(), torch.inference_mode(), torch.no_grad()):
        with scope:
            assert [made(x) for _ in range(3)] == [1] * 3
    assert len(looked) == 3


def test_kinds_that_take_turns_are_looked_up_in_the_first_rounds(made: Made, monkeypatch: pytest.MonkeyPatch) -> None:
    looked: list[int] = []
    monkeypatch.setattr(eager, "kind_of", lambda *kind: looked.append(1) or kind_of(*kind))
    kinds = [plain(n, 8) for n in (1, 2, 3)]
    for _ in range(5):
        assert [made(x) for x in kinds] == [1, 2, 3]
    assert len(looked) == 4  # the first three, and that the first follows the last
    for _ in range(3):
        assert made(kinds[0]) == 1
    assert len(looked) == 5  # it is followed by itself now


@pytest.mark.parametrize("places", [[], [2], [1, 2, 3], [0, 2], [0, 3, 4]], ids=str)
def test_what_is_chosen_of_a_tuple(places: list[int]) -> None:
    assert eager.chosen(places)((10, 11, 12, 13, 14)) == tuple(10 + at for at in places)


class Mode(TorchDispatchMode):
    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return function(*args, **(kwargs or {}))


class Own(Tensor):
    pass


def test_modes_transforms_subclasses_and_profilers_see_every_call(made: Made) -> None:
    x = plain()
    assert made(x) == 1
    scopes: list[Any] = [Mode(), FakeTensorMode(), watched()]
    for scope in scopes:
        with scope:
            assert made(x) is None
    seen: list[int | None] = []
    torch.func.vmap(lambda y: seen.append(made(x)) or y)(plain())
    torch.func.functionalize(lambda y: seen.append(made(y)) or y)(x)
    with FakeTensorMode():
        fake = plain()
    seen += [made(x.as_subclass(Own)), made(fake), made(x.to("meta")), made(x.to_sparse())]
    assert seen == [None] * 6 and made(x) == 1 and len(made.kinds) == 1


def test_tensors_without_memory_are_prepared_but_never_skip_torch(made: Made) -> None:
    x = plain().to("meta")
    assert made.plans((x,), ()) == 1 and made.plans((x,), ()) == 2
    assert made(x, settings=()) is None and not made.plans.known


@pytest.mark.parametrize("bad", [[1], "x", 3], ids=str)
def test_what_is_no_tensor_is_left_to_the_checks(made: Made, bad: Any) -> None:
    assert made(bad) is None and made(plain(), bad) is None
    assert made(plain(), settings=([], "auto")) is None  # no hash
    assert not made.kinds


def test_errors_are_raised_at_every_call_and_keep_nothing() -> None:
    def make(tensors: tuple[Any, ...], settings: tuple[Any, ...]) -> Any:
        raise ValueError("eps=-1 must not be negative")

    plans = Plans(make)
    for _ in range(3):
        with pytest.raises(ValueError, match="eps=-1"):
            plans.ready((plain(),), (-1,))
    assert not plans.known and plans.last is None


@pytest.mark.parametrize("op", ["rms_norm", "attention", "sample", "softmax"])
def test_bad_input_after_a_good_call_is_named_every_time(op: str) -> None:
    x, q = torch.randn(4, 8), torch.randn(1, 4, 2, 16)
    one: Any = 1
    whole: Any = 1.0
    calls: dict[str, tuple[Callable[[], Any], Callable[[], Any], str]] = {
        "rms_norm": (lambda: fk.rms_norm(x), lambda: fk.rms_norm(x, eps=True), "eps=True must be a number"),
        "attention": (
            lambda: fk.attention(q, q, q, causal=True), lambda: fk.attention(q, q, q, causal=one), "causal=1 must be a"
        ),
        "sample": (
            lambda: fk.fused.sample(x, top_k=1), lambda: fk.fused.sample(x, top_k=whole), "top_k=1.0 must be a whole"
        ),
        "softmax": (lambda: fk.softmax(x), lambda: fk.softmax(x.int()), "x.dtype=torch.int32 is not supported"),
    }  # fmt: skip
    good, bad, words = calls[op]
    for _ in range(2):
        good()
        with pytest.raises(TypeError, match=words):
            bad()


def test_no_more_is_kept_than_allowed(made: Made, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(eager, "MOST_PLANS", 8)
    for n in range(1, 40):
        assert made(plain(n, 8)) == n
        assert len(made.plans.known) <= 8
    assert made(plain(39, 8)) == 39


def test_no_tensor_is_kept() -> None:
    plans = Plans(lambda tensors, settings: lambda x: None)
    x = plain()
    gone = weakref.ref(x)
    assert plans.ready((x,), ()) is not None
    del x
    gc.collect()
    assert gone() is None


def test_threads_do_not_get_one_anothers_plans() -> None:
    """Four threads call with kinds of their own, at once: the last kind of the op is always some other thread's."""
    plans = Plans(lambda tensors, settings: lambda x: (tensors[0].shape, settings[0]))
    wrong: list[Any] = []
    start = threading.Barrier(4)

    def call(n: int) -> None:
        x = plain(n + 1, 8)
        start.wait()
        for i in range(2000):
            run = plans.ready((x,), (i % 3,))
            if run is None or run(x) != (x.shape, i % 3):
                wrong.append((n, i))

    at_once(call)
    assert not wrong and len(plans.known) == 12


def test_ops_serve_threads_at_once() -> None:
    inputs = [torch.randn(n + 2, 16) for n in range(4)]
    wanted = [torch.nn.functional.gelu(x) for x in inputs]
    wrong: list[int] = []

    def call(n: int) -> None:
        wrong.extend(n for _ in range(200) if not torch.allclose(fk.gelu(inputs[n]), wanted[n], atol=1e-6))

    at_once(call)
    assert not wrong


def test_another_device_is_made_current_for_the_call(monkeypatch: pytest.MonkeyPatch) -> None:
    entered: list[int] = []

    class Device:
        def __init__(self, index: int) -> None:
            self.index = index

        def __enter__(self) -> None:
            entered.append(self.index)

        def __exit__(self, *_: Any) -> None:
            entered.append(-1)

    monkeypatch.setattr(torch.cuda, "device", Device)
    monkeypatch.setattr(torch._C, "_cuda_getDevice", lambda: 0, raising=False)
    plans = Plans(lambda tensors, settings: lambda x: len(entered))
    x = plain()
    run = plans.ready((x,), ())
    assert run is not None and run(x) == 0
    assert plans.last is not None
    plans.last.device = 1
    run = plans.ready((x,), ())
    assert run is not None and run(x) == 1 and entered == [1, -1]


@pytest.mark.parametrize("strides", [None, (1, 3)], ids=["contiguous", "strided"])
def test_room_is_as_asked_for(strides: tuple[int, ...] | None) -> None:
    make = room((3, 2), torch.float16, torch.device("cpu"), strides)
    x, y = make(), make()
    assert x.shape == (3, 2) and x.stride() == (strides or (2, 1)) and x.dtype == torch.float16
    assert x.data_ptr() != y.data_ptr()


@pytest.mark.gpu
def test_room_on_a_gpu_is_the_caching_allocators() -> None:
    before = torch.cuda.memory_allocated()
    x = room((64, 256), torch.float32, torch.device("cuda", torch.cuda.current_device()))()
    assert x.device.index == torch.cuda.current_device() and torch.cuda.memory_allocated() == before + 65536
    with torch.inference_mode():
        assert room((2,), torch.float32, x.device)().is_inference()


@pytest.mark.gpu
def test_threads_launch_one_signature_at_once_on_streams_of_their_own() -> None:
    """They share the memory of a kernel's parameters, and must not see one another's pointers."""
    inputs = [torch.randn(64, 1024, device="cuda") for _ in range(4)]
    wanted = [x.softmax(-1) for x in inputs]
    torch.cuda.synchronize()
    wrong: list[int] = []

    def call(n: int) -> None:
        with torch.cuda.stream(torch.cuda.Stream()):
            for _ in range(200):
                out = fk.softmax(inputs[n])
            torch.cuda.current_stream().synchronize()
            if not torch.allclose(out, wanted[n], atol=1e-6):
                wrong.append(n)

    at_once(call)
    assert not wrong


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_a_call_on_another_gpu_than_the_current_one() -> None:
    q = torch.randn(1, 64, 4, 64, device="cuda:1", dtype=torch.bfloat16)
    x = torch.randn(4, 256, device="cuda:1")
    for _ in range(2):
        out = fk.attention(q, q, q)
        assert isinstance(out, Tensor) and out.device == q.device and fk.gelu(x).device == x.device
    assert torch.cuda.current_device() == 0


# What the guards alone do not tell


def test_a_gradient_is_not_lost_to_a_thread_that_needs_none(made: Made) -> None:
    """Another thread renews the guards while this one's are asked: their answer goes with what they were made for."""
    leaf = plain().requires_grad_()
    with torch.no_grad():
        made(leaf)
    plan = made.plans.last
    assert plan is not None and plan.guard is not None
    alike, untracked, firsts = plan.guard

    def meanwhile(*tensors: Tensor) -> bool:
        assert plan is not None
        plan.renew((plain(),))
        return alike(*tensors)

    plan.guard = (meanwhile, untracked, firsts)
    assert made(leaf) is None and plan.guard[1]


def test_the_same_tensor_twice_is_known_by_the_guards(made: Made) -> None:
    x, y = plain(), plain()
    assert [made(x, x), made(x, y), made(y, y), made(x, x)] == [1] * 4  # the memory does not make a kind
    plan = made.plans.last
    assert plan is not None and plan.serves((y, y), (1.0, "auto")) is True
    assert plan.serves((x, y), (1.0, "auto")) is None
    assert made(x, x.requires_grad_()) is None


def test_numbers_whose_sign_is_a_flag_go_through_torch(made: Made) -> None:
    assert made(plain()) == 1 and made(torch._neg_view(plain())) is None
    x = torch.randn(2, 40)
    torch.testing.assert_close(fk.softmax(torch._neg_view(x)), torch.softmax(-x, -1))


def test_tangents_are_refused(made: Made) -> None:
    x = plain()
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(x, torch.ones_like(x))
        with pytest.raises(NotImplementedError, match=r"shape \(4, 8\) has a tangent"):
            made(x, dual)
        assert made(x) is None  # torch sees what happens here
    with pytest.raises(NotImplementedError, match=r"shape \(4, 8\) has a tangent"):
        torch.func.jvp(fk.softmax, (x,), (x,))
    assert made(x) == 1


def test_settings_that_are_arrays_are_left_to_the_checks_of_the_op(made: Made) -> None:
    import numpy as np

    for value in (1.0, np.ones(3)):
        number = made(plain(), settings=(value,))
    assert number is None
