"""Muon for the matrices of the blocks, AdamW for everything else.

Muon (Keller Jordan and others, 2024, kellerjordan.github.io/posts/muon) steps a matrix along its momentum with all
singular values brought near one, by five steps of the quintic Newton-Schulz iteration published there. A step then has
the same size in every direction, which a small model needs most of its speed from.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch

from model.training.recipe import Recipe
from model.transformer import FrameTransformer

NEWTON_SCHULZ = (3.4445, -4.7750, 2.0315)
"""Coefficients of x, x^3 and x^5 from the source: steep at zero, values end between about 0.7 and 1.2."""

BETAS = (0.9, 0.98)


def orthogonalized(matrices: torch.Tensor) -> torch.Tensor:
    """``[M, rows, columns]`` with singular values near one and singular vectors kept."""
    a, b, c = NEWTON_SCHULZ
    tall = matrices.shape[1] > matrices.shape[2]
    x = matrices.mT if tall else matrices
    x = x / (torch.linalg.matrix_norm(x, keepdim=True) + 1e-7)
    for _ in range(5):
        gram = x @ x.mT
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x.mT if tall else x


class Muon(torch.optim.Optimizer):
    """Nesterov momentum, orthogonalized; matrices of one shape are taken together.

    A group's ``splits`` is how many matrices, one below the other, each of its parameters holds. The step of an
    ``[m, n]`` matrix is ``lr * sqrt(max(1, m / n))`` times its direction, as in the source. products: dtype of the
    iteration; the source takes bf16.
    """

    def __init__(
        self, groups: Iterable[dict[str, object]], lr: float, momentum: float, products: torch.dtype = torch.float32
    ) -> None:
        super().__init__(groups, {"lr": lr, "momentum": momentum, "splits": 1})
        self._products = products
        for group in self.param_groups:
            for weight in group["params"]:
                self.state[weight]["momentum"] = torch.zeros_like(weight)

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """One step along the gradients that are there."""
        for group in self.param_groups:
            weights: list[torch.Tensor] = group["params"]
            buffers = [self.state[weight]["momentum"] for weight in weights]
            gradients = [weight.grad for weight in weights if weight.grad is not None]
            assert len(gradients) == len(weights)
            torch._foreach_lerp_(buffers, gradients, 1 - group["momentum"])
            ahead = torch.stack(torch._foreach_lerp(gradients, buffers, group["momentum"]))
            rows, columns = ahead.shape[1] // group["splits"], ahead.shape[2]
            directions = orthogonalized(ahead.reshape(-1, rows, columns).to(self._products))
            directions = directions.to(ahead.dtype).reshape(ahead.shape)
            torch._foreach_add_(weights, directions.unbind(), alpha=-group["lr"] * max(1, rows / columns) ** 0.5)


def optimizers(model: FrameTransformer, recipe: Recipe) -> tuple[Muon, torch.optim.AdamW]:
    """Muon over the four matrices of every block (q, k and v as three), AdamW over all other parameters."""
    blocks = model.blocks
    groups: list[dict[str, object]] = [
        {"params": [block.qkv_weight for block in blocks], "splits": 3 if _is_plain(model) else 1},
        {"params": [block.out_weight for block in blocks]},
        {"params": [block.up_weight for block in blocks]},
        {"params": [block.down_weight for block in blocks]},
    ]
    matrices = {id(weight) for group in groups for weight in _parameters(group)}
    rest = [weight for weight in model.parameters() if id(weight) not in matrices]
    products = torch.bfloat16 if recipe.bf16 else torch.float32
    muon = Muon(groups, lr=recipe.matrix_lr, momentum=recipe.momentum, products=products)
    adamw = torch.optim.AdamW(rest, lr=recipe.lr, betas=BETAS, weight_decay=recipe.weight_decay, foreach=True)
    for weight in rest:  # what the first step would make, so that a state has its whole shape before it
        adamw.state[weight] = {
            "step": torch.zeros(()),
            "exp_avg": torch.zeros_like(weight),
            "exp_avg_sq": torch.zeros_like(weight),
        }
    return muon, adamw


def _is_plain(model: FrameTransformer) -> bool:
    """Whether q, k and v are equally tall."""
    return model.config.num_heads == model.config.num_kv_heads


def _parameters(group: dict[str, object]) -> Sequence[torch.nn.Parameter]:
    weights = group["params"]
    assert isinstance(weights, list)
    return weights


def set_rates(muon: Muon, adamw: torch.optim.AdamW, recipe: Recipe, step: int) -> None:
    """Learning rates of step ``step``."""
    factor = recipe.rate(step)
    for optimizer, rate in ((muon, recipe.matrix_lr), (adamw, recipe.lr)):
        for group in optimizer.param_groups:
            group["lr"] = rate * factor
