"""Attention as a module, for models that are built from modules."""

from __future__ import annotations

from torch import Tensor, nn

from flashkernels.attention.api import attention


class Attention(nn.Module):
    """`attention` with its settings fixed; the tensors come with each call. It has no parameters of its own, and drops
    weights only in training, as `torch.nn.Dropout` does.

    >>> import torch, flashkernels as fk
    >>> layer = fk.Attention(causal=True, window=(127, 0))
    >>> q = torch.randn(1, 9, 4, 72)
    >>> layer(q, q, q).shape
    torch.Size([1, 9, 4, 72])
    """

    def __init__(
        self, *, causal: bool = False, softmax_scale: float | None = None, window: tuple[int, int] = (-1, -1),
        softcap: float = 0.0, layout: str = "bshd", return_lse: bool = False, impl: str = "auto",
        dropout_p: float = 0.0, deterministic: bool = False,
    ) -> None:  # fmt: skip
        super().__init__()
        self.causal, self.softmax_scale, self.window, self.softcap = causal, softmax_scale, window, softcap
        self.layout, self.return_lse, self.impl = layout, return_lse, impl
        self.dropout_p, self.deterministic = dropout_p, deterministic

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, *, alibi_slopes: Tensor | None = None, sinks: Tensor | None = None,
        mask: Tensor | None = None, q_scale: Tensor | None = None, k_scale: Tensor | None = None,
        v_scale: Tensor | None = None, dropout_seed: int | Tensor | None = None,
    ) -> Tensor | tuple[Tensor, Tensor]:  # fmt: skip
        """Shapes as in `flashkernels.attention`."""
        return attention(
            q, k, v, causal=self.causal, softmax_scale=self.softmax_scale, window=self.window, softcap=self.softcap,
            alibi_slopes=alibi_slopes, sinks=sinks, mask=mask, q_scale=q_scale, k_scale=k_scale, v_scale=v_scale,
            layout=self.layout, return_lse=self.return_lse, impl=self.impl,
            dropout_p=self.dropout_p if self.training else 0.0, dropout_seed=dropout_seed,
            deterministic=self.deterministic,
        )  # fmt: skip

    def extra_repr(self) -> str:
        names = ("causal", "softmax_scale", "window", "softcap", "layout", "return_lse", "impl", "dropout_p")
        return ", ".join(f"{name}={getattr(self, name)!r}" for name in names)
