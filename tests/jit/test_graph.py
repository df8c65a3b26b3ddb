"""`fk.Graph`: buckets, kinds of calls, buffers and refusals everywhere; capture and replay where there is a GPU."""

from __future__ import annotations

import functools
import weakref
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import flashkernels as fk
from flashkernels.jit.captured import Watch, held
from flashkernels.jit.graph import GraphError, new_casts

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
on_devices = pytest.mark.parametrize("device", DEVICES)


@pytest.fixture(autouse=True)
def _no_gradients() -> Any:
    with torch.no_grad():
        yield


@on_devices
def test_the_result_is_that_of_the_function(device: str) -> None:
    x, y = torch.randn(2, 3, 5, device=device)
    step = fk.Graph(lambda a, b, *, scale: {"sum": (a + b) * scale, "pair": (a, [b * 2])})
    for factor in (2.0, 2.0, 3.0):
        got = step(x, y, scale=factor)
        assert torch.equal(got["sum"], (x + y) * factor) and torch.equal(got["pair"][1][0], y * 2)
    assert [one.calls for one in step.report().captures] == [2, 1]


@on_devices
def test_new_values_give_new_results(device: str) -> None:
    step = fk.Graph(lambda x: x @ x.T)
    for seed in range(4):
        x = torch.randn(4, 6, generator=torch.Generator().manual_seed(seed)).to(device)
        torch.testing.assert_close(step(x), x @ x.T)
    assert len(step.report().captures) == 1


@on_devices
@pytest.mark.parametrize("rows", [1, 3, 4, 5, 8])
def test_a_batch_is_padded_to_its_bucket_and_cut(rows: int, device: str) -> None:
    seen: list[Tensor] = []

    def function(x: Tensor, table: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        seen.append(x)
        return weight[table.long()] + x, weight * 2

    step = fk.Graph(function, batch=("x", "table"), buckets=(1, 4, 8))
    x, table = torch.randn(rows, 3, device=device), torch.arange(rows, device=device)
    weight = torch.randn(9, 3, device=device)
    got, other = step(x, table, weight=weight)
    bucket = next(size for size in (1, 4, 8) if size >= rows)
    assert torch.equal(got, weight[table] + x) and torch.equal(other, weight * 2)
    assert {one.shape[0] for one in seen} == {bucket}
    if device == "cpu":
        assert torch.equal(seen[-1][rows:], x[-1:].expand(bucket - rows, 3))  # a valid row, whatever it means


def test_batches_of_one_bucket_share_a_capture() -> None:
    step = fk.Graph(lambda x: x + 1, batch=("x",), buckets=(4, 8))
    for rows in (1, 4, 3, 5, 8):
        assert torch.equal(step(torch.arange(rows)), torch.arange(rows) + 1)
    assert [(one.inputs[0].shape[0], one.calls) for one in step.report().captures] == [(4, 3), (8, 2)]


@pytest.mark.parametrize(
    "other",
    [torch.zeros(3), torch.zeros(2, 2), torch.zeros(2, dtype=torch.float64), torch.zeros(4)[:2, None].T[0]],
    ids=["size", "rank", "dtype", "same"],
)
def test_a_new_kind_of_call_is_captured_anew(other: Tensor) -> None:
    step = fk.Graph(lambda x: x + 1)
    step(torch.zeros(2))
    assert torch.equal(step(other), other + 1)
    same = other.shape == (2,) and other.dtype == torch.float32
    assert len(step.report().captures) == (1 if same else 2)


def test_strides_are_kept_in_order() -> None:
    seen = []
    step = fk.Graph(lambda x: seen.append(x.stride()) or x + 0)
    x = torch.randn(2, 3, 4).transpose(1, 2)
    assert torch.equal(step(x), x) and seen[-1] == x.stride()
    assert torch.equal(step(x[:1].expand(2, 4, 3)), x[:1].expand(2, 4, 3))


@on_devices
def test_outputs_are_the_callers_unless_asked_otherwise(device: str) -> None:
    a, b = torch.zeros(2, device=device), torch.ones(2, device=device)
    step = fk.Graph(lambda x: x + 1)
    first = step(a)
    step(b)
    assert first.tolist() == [1, 1]
    if device == "cuda":
        step = fk.Graph(lambda x: x + 1, copy=False)
        first = step(a)
        step(b)
        assert first.tolist() == [2, 2]


@on_devices
def test_a_static_argument_is_changed_in_place(device: str) -> None:
    cache, x = torch.zeros(4, device=device), torch.ones(4, device=device)

    def function(x: Tensor, cache: Tensor) -> Tensor:
        cache.copy_(x)
        return cache * 2

    step = fk.Graph(function, static=("cache",))
    step(x, cache)
    assert step(x * 3, cache).tolist() == [6] * 4 and cache.tolist() == [3] * 4


@on_devices
def test_an_argument_that_is_changed_in_place_must_be_static(device: str) -> None:
    step = fk.Graph(lambda x: x.add_(1))
    with pytest.raises(GraphError, match=r"changes its argument x in place: name it in static="):
        step(torch.zeros(2, device=device))
    assert not step.captures


@dataclass(eq=False)
class Pages:
    k: Tensor
    size: int = 4


@on_devices
@pytest.mark.parametrize("kind", ["closure", "module", "partial", "method", "static", "dataclass"])
def test_a_tensor_that_moved_is_refused(kind: str, device: str) -> None:
    x, weight = torch.ones(3, device=device), torch.ones(3, device=device)
    module = nn.Linear(3, 3, device=device)
    pages = Pages(weight)

    class Model:
        def __init__(self) -> None:
            self.scale = weight

        def run(self, x: Tensor) -> Tensor:
            return x * self.scale

    model, box = Model(), {"w": weight}
    step, arguments = {
        "closure": (fk.Graph(lambda x: x * box["w"]), ()), "module": (fk.Graph(module), ()),
        "partial": (fk.Graph(functools.partial(lambda w, x: x * w[0], [weight])), ()),
        "method": (fk.Graph(model.run), ()),
        "static": (fk.Graph(lambda x, w: x * w, static=("w",)), (weight,)),
        "dataclass": (fk.Graph(lambda x, p: x * p.k), (pages,)),
    }[kind]  # fmt: skip
    step(x, *arguments)
    step(x, *arguments)
    moved = torch.full((3,), 5.0, device=device)
    if kind == "partial":
        step.function.args[0][0] = moved
    box["w"] = model.scale = pages.k = moved
    module.weight = nn.Parameter(torch.zeros(3, 3, device=device))
    arguments = (moved,) if kind == "static" else arguments
    with pytest.raises(GraphError, match=r"was at 0x\w+ and is at 0x\w+.*clear\(\)"):
        step(x, *arguments)
    step.clear()
    expected = module(x) if kind == "module" else x * moved
    assert torch.equal(step(x, *arguments), expected)


@on_devices
@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda pool: pool[:8], r"had shape \(4,\) and has \(8,\)"),
        (lambda pool: pool[:8:2], r"had strides \(1,\) and has \(2,\)"),
        (lambda pool: pool[:4].view(torch.int32), "was torch.float32 and is torch.int32"),
        (lambda pool: pool[4:6], r"was at 0x\w+ and is at 0x\w+, had shape \(4,\) and has \(2,\)"),
        (lambda pool: None, "is no tensor any more, but NoneType"),
    ],
    ids=["shape", "stride", "dtype", "two", "none"],
)
def test_another_tensor_at_the_same_address_is_refused(change: Any, message: str, device: str) -> None:
    pool = torch.ones(16, device=device)
    cache, x = pool[:4], torch.ones(1, device=device)
    step = fk.Graph(lambda x: x + (0 if cache is None else cache.sum()))
    assert step(x).tolist() == step(x).tolist() == [5]
    cache = change(pool)
    with pytest.raises(GraphError, match=f"cache {message}.*clear"):
        step(x)
    step.clear()
    step(x)


def test_a_tensor_in_two_places_is_watched_in_both() -> None:
    weight = torch.ones(3)
    for name in ("a", "b"):
        box = {"a": weight, "b": weight, "other": torch.ones(1)}
        function = functools.partial(lambda x, a, b, other: x * a * b * other, **box)
        watch = Watch(held(function))
        assert watch._same() and watch.moved() == []
        function.keywords[name] = weight.clone()
        assert [words.split()[0] for words in watch.moved()] == [name]


def test_a_tensor_resized_in_place_is_seen() -> None:
    weight = torch.ones(4)
    watch = Watch(held(lambda x: x * weight))
    weight.requires_grad_()  # which does not matter
    assert watch.moved() == []
    weight.requires_grad_(False).resize_(2)
    assert watch.moved() == ["weight had shape (4,) and has (2,)"]


class Config:
    def __init__(self, scale: float) -> None:
        self.scale = scale


@on_devices
@pytest.mark.parametrize("wrap", [lambda c: c, lambda c: [c], lambda c: {c: None}], ids=["plain", "list", "key"])
def test_an_object_lives_as_long_as_its_capture(wrap: Any, device: str) -> None:
    """Else the next one gets its id, and its graph."""
    x = torch.ones(2, device=device)

    def function(x: Tensor, c: Any) -> Tensor:
        return x * (c if isinstance(c, Config) else next(iter(c))).scale

    step = fk.Graph(function, most=2)
    for scale in (2.0, 3.0, 4.0, 5.0):
        assert step(x, wrap(Config(scale))).tolist() == [scale] * 2
    assert [one.calls for one in step.report().captures] == [1, 1]
    step = fk.Graph(function)
    config = Config(2.0)
    alive = weakref.ref(config)
    step(x, c=wrap(config))
    step(x, c=wrap(config))
    assert [one.calls for one in step.report().captures] == [2]
    del config
    assert alive() is not None
    step.clear()
    assert alive() is None


@dataclass
class Scaled:
    k: Tensor
    scale: float


@on_devices
def test_a_number_in_a_dataclass_is_part_of_the_kind(device: str) -> None:
    x = torch.ones(2, device=device)
    one = Scaled(x * 2, 1.0)
    step = fk.Graph(lambda x, one: x * one.k * one.scale)
    for one.scale in (1.0, 3.0, 1.0):
        assert step(x, one).tolist() == [2 * one.scale] * 2
    assert [capture.calls for capture in step.report().captures] == [2, 1]


class Doubling(nn.Module):
    """Twice x where it trains."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Identity())

    def forward(self, x: Tensor) -> Tensor:
        return x * (2 if self.inner[0].training else 1)


@on_devices
@pytest.mark.parametrize("kind", ["function", "closure", "method", "argument"])
def test_training_or_not_is_part_of_the_kind(kind: str, device: str) -> None:
    net, x = Doubling(), torch.ones(2, device=device)
    step, arguments = {
        "function": (fk.Graph(net), ()), "closure": (fk.Graph(lambda x: net(x)), ()),
        "method": (fk.Graph(net.forward), ()), "argument": (fk.Graph(lambda x, net: net(x)), (net,)),
    }[kind]  # fmt: skip
    for training in (True, False, False, True, True):
        net.inner[0].train(training)
        assert step(x, *arguments).tolist() == [2 if training else 1] * 2
    assert [one.calls for one in step.report().captures] == [3, 2]


@on_devices
def test_a_module_as_an_argument_is_watched(device: str) -> None:
    net, x = nn.Linear(2, 2, device=device), torch.ones(2, device=device)
    step = fk.Graph(lambda x, net: net(x))
    assert torch.equal(step(x, net), net(x))
    net.weight = nn.Parameter(torch.zeros(2, 2, device=device))
    with pytest.raises(GraphError, match=r"net.weight was at"):
        step(x, net)


@on_devices
def test_modules_that_come_later_are_found(device: str) -> None:
    late, x = None, torch.ones(2, device=device)

    def function(x: Tensor) -> Tensor:
        return x * 1 if late is None else late(x)

    step = fk.Graph(function)
    step(x)
    late = Doubling()
    y = torch.ones(3, device=device)
    assert step(y).tolist() == step(y).tolist() == [2] * 3
    assert step(x).tolist() == [2] * 2  # not the capture of before
    late.eval()
    assert step(y).tolist() == [1] * 3
    assert [one.calls for one in step.report().captures] == [1, 2, 1, 1]


@on_devices
def test_autocast_is_part_of_the_kind(device: str) -> None:
    x, weight = torch.randn(4, 4, device=device), torch.randn(4, 4, device=device)
    step, found = fk.Graph(lambda x: x @ weight), []
    for dtype in (None, torch.bfloat16, torch.float16, None, torch.bfloat16):
        with torch.autocast(device, dtype=dtype, enabled=dtype is not None):
            found.append(step(x).dtype)
            torch.testing.assert_close(step(x), x @ weight)
    assert found == [torch.float32, torch.bfloat16, torch.float16, torch.float32, torch.bfloat16]
    assert [one.calls for one in step.report().captures] == [4, 4, 2]


@on_devices
def test_the_modes_of_gradients_are_part_of_the_kind(device: str) -> None:
    x = torch.ones(2, device=device)
    step, modes = fk.Graph(lambda x: x + 1), (torch.no_grad, torch.inference_mode, torch.enable_grad)
    for mode in modes * 2:
        with mode():
            got = step(x)
            assert got.tolist() == [2] * 2 and got.is_inference() == (mode is torch.inference_mode)
    assert [one.calls for one in step.report().captures] == [2, 2, 2]


@on_devices
def test_casts_are_not_kept_while_capturing(device: str) -> None:
    weight, x = nn.Parameter(torch.ones(2, 2, device=device)), torch.ones(2, 2, device=device)
    with torch.autocast(device, dtype=torch.bfloat16):
        assert (x @ weight).tolist() == [[2, 2]] * 2
        weight.data.fill_(3)
        with new_casts():
            assert (x @ weight).tolist() == [[6, 6]] * 2
        assert torch.is_autocast_cache_enabled()


@pytest.mark.gpu
def test_a_captured_cast_follows_its_weight() -> None:
    weight, x = nn.Parameter(torch.ones(64, 64, device="cuda")), torch.ones(64, 64, device="cuda")
    step = fk.Graph(lambda x: x @ weight)
    for value in (1.0, 2.0, 3.0):
        weight.data.fill_(value)
        with torch.autocast("cuda", dtype=torch.bfloat16):
            assert torch.equal(step(x), torch.full_like(x, 64 * value, dtype=torch.bfloat16))
        torch.full((1 << 20,), 7.0, device="cuda")  # what a kept cast would have been freed to
    assert [one.calls for one in step.report().captures] == [3]


def test_what_a_function_holds_has_names() -> None:
    weight, extra = torch.ones(2), [torch.ones(1), "no tensor"]

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(2, 2)
            self.register_buffer("mean", torch.zeros(2))

        def forward(self, x: Tensor, bias: Tensor = weight) -> Tensor:
            return self.inner(x) + self.mean + bias

    assert {one.name for one in held(Net())} == {"inner.weight", "inner.bias", "mean"}
    assert {one.name for one in held(lambda x, y=weight: x + y + extra[0])} == {"default 0", "extra[0]"}
    net = Net()
    assert {one.name for one in held(lambda x: net(x))} == {"net.inner.weight", "net.inner.bias", "net.mean"}


def test_a_module_is_a_function() -> None:
    module = nn.Linear(3, 2)
    step = fk.Graph(module, batch=("input",), buckets=(4,))
    x = torch.randn(3, 3)
    torch.testing.assert_close(step(x), module(x))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"batch": ("y",), "buckets": (1,)}, r"\['y'\] are no arguments of .*: it has x"),
        ({"batch": ("x",)}, "go together"),
        ({"buckets": (1, 2)}, "go together"),
        ({"batch": ("x",), "buckets": (4, 2)}, r"buckets=\[4, 2\] must be positive and ascend"),
        ({"batch": ("x",), "buckets": (0, 2)}, "must be positive"),
        ({"warmup": 0}, "warmup=0"),
        ({"static": "x"}, "static='x' must be a list"),
    ],
)
def test_bad_settings_are_named(settings: dict[str, Any], message: str) -> None:
    with pytest.raises((TypeError, ValueError), match=message):
        fk.Graph(lambda x: x, **settings)


def test_bad_calls_are_named() -> None:
    step = fk.Graph(lambda x, y=None: x, batch=("x", "y"), buckets=(2, 4))
    with pytest.raises(ValueError, match=r"a batch of 5 has no bucket among \[2, 4\]"):
        step(torch.zeros(5))
    with pytest.raises(ValueError, match="a batch of 0"):
        step(torch.zeros(0))
    with pytest.raises(ValueError, match="x has 2, y has 3"):
        step(torch.zeros(2), torch.zeros(3))
    with pytest.raises(ValueError, match="x has no dimensions"):
        step(torch.tensor(1.0))
    with pytest.raises(TypeError, match="callable"):
        fk.Graph(3)
    with torch.enable_grad(), pytest.raises(GraphError, match="no gradients"):
        step(torch.zeros(2, requires_grad=True))


def test_the_oldest_kind_is_forgotten() -> None:
    step = fk.Graph(lambda x: x + 1, most=2)
    for size in (1, 2, 3, 1):
        step(torch.zeros(size))
    assert [one.inputs[0].shape[0] for one in step.report().captures] == [3, 1]


def test_an_exception_leaves_no_capture() -> None:
    broken = True

    def function(x: Tensor) -> Tensor:
        if broken:
            raise KeyError("no")
        return x

    step = fk.Graph(function)
    with pytest.raises(KeyError):
        step(torch.ones(1))
    broken = False
    assert step(torch.ones(1)).tolist() == [1]


def test_the_decorator_keeps_the_name_and_takes_settings() -> None:
    @fk.graph(batch=("x",), buckets=(4,))
    def double(x: Tensor) -> Tensor:
        """Twice x."""
        return x * 2

    assert double.__name__ == "double" and double.__doc__ == "Twice x."
    assert double(torch.ones(3)).shape == (3,)
    text = str(double.report())
    assert "double: 1 captured, 0 launches saved" in text and "4: 1 calls" in text


@pytest.mark.gpu
def test_replay_is_bitwise_eager_and_saves_launches() -> None:
    torch.manual_seed(0)
    q, k, v = torch.randn(3, 4, 128, 8, 72, device="cuda", dtype=torch.bfloat16)
    weight = torch.randn(8 * 72, device="cuda", dtype=torch.bfloat16)

    def layer(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out = fk.attention(q, k, v, causal=True).flatten(2)
        return fk.rms_norm(torch.nn.functional.silu(out), weight, residual=out)[0]

    step = fk.Graph(layer, batch=("q", "k", "v"), buckets=(2, 4))
    for rows in (4, 3, 4, 1, 2):
        a, b, c = (x[:rows] * (rows + 1) for x in (q, k, v))
        pad = [torch.cat([x, x[-1:].expand(-rows % 2 if rows < 3 else 4 - rows, -1, -1, -1)]) for x in (a, b, c)]
        assert torch.equal(step(a, b, c), layer(*pad)[:rows])
    report = step.report()
    assert report.launches_saved >= 2 * 5 and all(one.eager_ms > 0 for one in report.captures), str(report)
    print(report)


@pytest.mark.gpu
def test_streams_wait_for_one_another() -> None:
    step = fk.Graph(lambda x: (x.cumsum(0) - x.cumsum(0)) + x)  # slow enough to overlap
    streams = [torch.cuda.Stream() for _ in range(3)]
    big = 1 << 22
    found = []
    for i in range(30):
        with torch.cuda.stream(streams[i % 3]):
            found.append((i, step(torch.full((big,), float(i), device="cuda", dtype=torch.float64))))
    torch.cuda.synchronize()
    assert all(bool((x == i).all()) for i, x in found)


@pytest.mark.gpu
def test_inside_another_capture_it_is_the_function() -> None:
    step = fk.Graph(lambda x: x * 3)
    x = torch.ones(4, device="cuda")
    outer = torch.cuda.CUDAGraph()
    step(x)
    with torch.cuda.graph(outer):
        y = step(x)
    x.fill_(2)
    outer.replay()
    assert y.tolist() == [6] * 4
