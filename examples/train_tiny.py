"""Trains a small transformer twice, once with `fk.attention` and once with torch's SDPA, and compares the losses.

    python examples/train_tiny.py                    # on the GPU, where there is one
    python examples/train_tiny.py --device cpu --steps 60 --out losses.png

Two layers, two heads of 72, half a million parameters; it learns to write sums: "17+25=42;". Both runs start from the
same weights and see the same batches, so their curves may differ by rounding alone. The program plots both (without
matplotlib it writes a CSV) and exits with 1 if they are further apart than TOLERANCE.
"""

from __future__ import annotations

import argparse
import csv
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import flashkernels as fk

ALPHABET = "0123456789+=;"
LAYERS, HEADS, HEAD_DIM, LENGTH, BATCH = 2, 2, 72, 96, 8
WIDTH = HEADS * HEAD_DIM
# Largest difference of the two losses at any step, both near 2.5 at first. Rounding of the gradients is amplified from
# step to step: fp32 leaves about 1e-6 after 100 steps on a CPU; bf16 has 2^16 times larger roundings.
TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 5e-2}

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]


def flash(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Attention of (B, S, H, D) tensors."""
    return fk.attention(q, k, v, causal=True)


def sdpa(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2)


class Block(nn.Module):
    def __init__(self, attend: Attend) -> None:
        super().__init__()
        self.attend = attend
        self.norm, self.norm_mlp = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm(x)).unflatten(-1, (3, HEADS, HEAD_DIM)).unbind(2)  # (B, S, H, D)
        x = x + self.out(self.attend(q, k, v).flatten(2))
        return x + self.mlp(self.norm_mlp(x))


class Transformer(nn.Module):
    def __init__(self, attend: Attend) -> None:
        super().__init__()
        self.characters, self.places = nn.Embedding(len(ALPHABET), WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.blocks = nn.Sequential(*(Block(attend) for _ in range(LAYERS)))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, len(ALPHABET))

    def forward(self, text: Tensor) -> Tensor:
        x = self.characters(text) + self.places.weight[: text.shape[1]]
        return self.head(self.norm(self.blocks(x)))


def batches(seed: int) -> Iterator[Tensor]:
    """(BATCH, LENGTH + 1) characters of random sums, without end."""
    random = torch.Generator().manual_seed(seed)
    code = {character: i for i, character in enumerate(ALPHABET)}
    while True:
        rows = []
        for _ in range(BATCH):
            pairs = torch.randint(100, (LENGTH // 4, 2), generator=random).tolist()
            text = "".join(f"{a}+{b}={a + b};" for a, b in pairs)
            rows.append([code[character] for character in text[: LENGTH + 1]])
        yield torch.tensor(rows)


def train(attend: Attend, steps: int, device: torch.device, dtype: torch.dtype, seed: int) -> list[float]:
    """The loss of every step."""
    torch.manual_seed(seed)
    model = Transformer(attend).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    losses = []
    for _, text in zip(range(steps), batches(seed), strict=False):
        text = text.to(device)
        with torch.autocast(device.type, dtype, enabled=dtype != torch.float32):
            logits = model(text[:, :-1])
        loss = F.cross_entropy(logits.float().flatten(0, 1), text[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return torch.stack(losses).tolist()


def write(path: Path, curves: dict[str, list[float]], title: str) -> Path:
    """The curves as a plot, or as a CSV beside it where there is no matplotlib."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        path = path.with_suffix(".csv")
        with path.open("w", newline="") as file:
            table = csv.writer(file)
            table.writerow(["step", *curves])
            table.writerows(zip(range(len(next(iter(curves.values())))), *curves.values(), strict=True))
        print("matplotlib is not installed (pip install 'flashkernels[report]'): a table instead of a plot")
        return path
    axes = (figure := Figure(figsize=(7, 4), layout="constrained")).subplots()
    for (name, losses), style in zip(curves.items(), ("-", "--"), strict=True):
        axes.plot(losses, style, label=name)
    axes.set(xlabel="step", ylabel="loss", title=title)
    axes.legend()
    figure.savefig(path, dpi=120)
    return path


def main() -> int:
    here = "cuda" if torch.cuda.is_available() else "cpu"
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default=here, choices=["cpu", "cuda"])
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], help="default: bfloat16 on a GPU, else float32")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path("train_tiny.png"), help="where the plot goes")
    options = parser.parse_args()
    if options.steps < 1:
        parser.error(f"--steps={options.steps} must be at least 1")
    device = torch.device(options.device)
    dtype = getattr(torch, options.dtype or ("bfloat16" if device.type == "cuda" else "float32"))

    curves: dict[str, list[float]] = {}
    for name, attend in (("fk.attention", flash), ("torch SDPA", sdpa)):
        start = time.perf_counter()
        curves[name] = losses = train(attend, options.steps, device, dtype, options.seed)
        print(f"{name}: loss {losses[0]:.4f} -> {losses[-1]:.4f}, {time.perf_counter() - start:.1f} s")
    apart = max(abs(a - b) for a, b in zip(*curves.values(), strict=True))
    written = write(options.out, curves, f"head_dim {HEAD_DIM}, {str(dtype).removeprefix('torch.')} on {device.type}")
    allowed = TOLERANCE[dtype]
    agree = apart <= allowed  # a NaN does not
    print(f"largest difference {apart:.2g}, {allowed:g} allowed: {'agree' if agree else 'DISAGREE'}; {written}")
    return 0 if agree else 1


if __name__ == "__main__":
    sys.exit(main())
