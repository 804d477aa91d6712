"""Geometry of the reference model, and its presets. No torch: a bad value is refused before anything heavy loads."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from ringkv.config import require_int

PUBLISHED_SIGMAS = (1.0, 0.9, 0.75, 0.3, 0.0)
"""Noise levels of Waypoint-1.5: four denoise passes, then the committing pass at 0."""

NOISE_FEATURES = 32
"""Cosine features of the noise level that the conditioning reads."""

MODULATIONS = 6
"""Shift, scale and gate of the attention branch, then of the MLP branch."""


def checked_sigmas(owner: str, sigmas: Sequence[float]) -> tuple[float, ...]:
    """``sigmas`` as floats; ``ValueError`` unless they fall strictly from at most 1 to exactly 0, two at least."""
    rule = "expected two or more numbers falling strictly from at most 1 to 0"
    try:
        values = tuple(float(sigma) for sigma in sigmas)
    except (TypeError, ValueError) as error:
        raise ValueError(f"{owner}.sigmas={sigmas!r}: {rule}") from error
    falling = all(later < earlier for earlier, later in pairwise(values))
    if len(values) < 2 or not falling or values[0] > 1 or values[-1] != 0:
        raise ValueError(f"{owner}.sigmas={list(values)}: {rule}")
    return values


def fitting_tokens(height: int, width: int) -> list[int]:
    """Every ``tokens_per_frame`` that cuts a ``height x width`` frame into whole square patches, ascending."""
    common = math.gcd(height, width)
    sides = [side for side in range(1, common + 1) if common % side == 0]
    return sorted(height * width // side**2 for side in sides)


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """Geometry of a ``FrameTransformer``. Change a field with ``dataclasses.replace``.

    name: the preset it came from. channels, height, width: of one frame, in pixels or in latent elements.
    tokens_per_frame: square patches that a frame is cut into, in row-major order. num_heads: query heads; query head h
    reads KV head ``h // (num_heads // num_kv_heads)``. mlp_ratio: MLP width over ``d_model``. num_actions: actions are
    integers below it. global_period: every such layer, counted from 1, is global, that is dilated; a period above
    ``num_layers`` leaves all layers local. shared_modulation: one modulation matrix for all layers, with a bias for
    each, in place of a matrix per layer. sigmas: the noise levels it is sampled at.
    """

    name: str
    channels: int
    height: int
    width: int
    tokens_per_frame: int
    d_model: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    mlp_ratio: int = 4
    num_actions: int
    global_period: int
    shared_modulation: bool = False
    sigmas: tuple[float, ...] = PUBLISHED_SIGMAS

    def __post_init__(self) -> None:
        for key in (
            "channels",
            "height",
            "width",
            "tokens_per_frame",
            "d_model",
            "num_layers",
            "num_heads",
            "num_kv_heads",
            "head_dim",
            "mlp_ratio",
            "num_actions",
            "global_period",
        ):
            require_int("ModelConfig", key, getattr(self, key), 1)
        if self.num_heads % self.num_kv_heads:
            raise ValueError(
                f"ModelConfig.num_heads={self.num_heads}: expected a multiple of num_kv_heads={self.num_kv_heads}"
            )
        if self.head_dim % 8:
            raise ValueError(
                f"ModelConfig.head_dim={self.head_dim}: expected a multiple of 8, so that a quarter of the head holds "
                "whole rotation pairs"
            )
        fitting = fitting_tokens(self.height, self.width)
        if self.tokens_per_frame not in fitting:
            raise ValueError(
                f"ModelConfig.tokens_per_frame={self.tokens_per_frame}: square patches of a {self.height} x "
                f"{self.width} frame give {', '.join(map(str, fitting))}"
            )
        object.__setattr__(self, "sigmas", checked_sigmas("ModelConfig", self.sigmas))

    @property
    def patch(self) -> int:
        """Side of a patch, in pixels."""
        return math.isqrt(self.height * self.width // self.tokens_per_frame)

    @property
    def grid(self) -> tuple[int, int]:
        """Rows and columns of patches."""
        return self.height // self.patch, self.width // self.patch

    @property
    def patch_elements(self) -> int:
        """Elements of one patch, all channels."""
        return self.channels * self.patch**2

    def layer_dilations(self, dilation: int) -> tuple[int, ...]:
        """Dilation of each layer's ring: 1 for a local layer, ``dilation`` for a global one."""
        require_int("ModelConfig", "layer_dilations(dilation)", dilation, 1)
        return tuple(1 if layer % self.global_period else dilation for layer in range(1, self.num_layers + 1))

    def weight_geometry(self) -> dict[str, Any]:
        """What tensor shapes depend on: weights fit a model exactly when these agree.

        ``global_period`` and ``sigmas`` are not among them, nor is anything of the cache: those may differ between
        training and serving.
        """
        return {
            key: getattr(self, key)
            for key in (
                "channels",
                "height",
                "width",
                "tokens_per_frame",
                "d_model",
                "num_layers",
                "num_heads",
                "num_kv_heads",
                "head_dim",
                "mlp_ratio",
                "num_actions",
                "shared_modulation",
            )
        }

    @property
    def num_parameters(self) -> int:
        """Parameters of the model, counted without allocating it."""
        d, layers = self.d_model, self.num_layers
        query, key_value = self.num_heads * self.head_dim, 2 * self.num_kv_heads * self.head_dim
        embeddings = self.patch_elements * d + self.tokens_per_frame * d + d
        noise = NOISE_FEATURES * d + d + d * d + d
        matrices = 1 if self.shared_modulation else layers
        modulation = matrices * MODULATIONS * d * d + layers * MODULATIONS * d
        block = (query + key_value) * d + d * query + 2 * self.mlp_ratio * d * d + self.num_heads
        head = d * self.patch_elements + self.patch_elements
        return embeddings + noise + self.num_actions * d + modulation + layers * block + (layers - 1) + head


def _waypoint(name: str, height: int, width: int) -> ModelConfig:
    # The published description gives tokens and widths, not the codec: 16 latent channels and patches of 2 are our
    # choice, and so is the shared modulation, which keeps the count near the published 1.2 B (1.7 B otherwise).
    return ModelConfig(
        name=name,
        channels=16,
        height=height,
        width=width,
        tokens_per_frame=height * width // 4,
        d_model=2048,
        num_layers=24,
        num_heads=32,
        num_kv_heads=16,
        head_dim=64,
        num_actions=3,
        global_period=4,
        shared_modulation=True,
    )


def _trained(
    name: str,
    side: int,
    tokens_per_frame: int,
    *,
    d_model: int,
    num_layers: int,
    num_actions: int,
    global_period: int | None = None,
) -> ModelConfig:
    return ModelConfig(
        name=name,
        channels=3,
        height=side,
        width=side,
        tokens_per_frame=tokens_per_frame,
        d_model=d_model,
        num_layers=num_layers,
        num_heads=d_model // 32,
        num_kv_heads=d_model // 32,
        head_dim=32,
        num_actions=num_actions,
        global_period=num_layers + 1 if global_period is None else global_period,
    )


_PRESETS = (
    # Interactive on two CPU cores.
    ModelConfig(
        name="tiny",
        channels=3,
        height=64,
        width=64,
        tokens_per_frame=64,
        d_model=160,
        num_layers=6,
        num_heads=4,
        num_kv_heads=2,
        head_dim=32,
        num_actions=3,
        global_period=3,
    ),
    ModelConfig(
        name="small",
        channels=3,
        height=64,
        width=64,
        tokens_per_frame=64,
        d_model=384,
        num_layers=8,
        num_heads=6,
        num_kv_heads=3,
        head_dim=64,
        num_actions=3,
        global_period=4,
    ),
    # For training; their weights lie in model/checkpoints. No layer is global.
    _trained("freeway", 64, 64, d_model=128, num_layers=4, num_actions=3),
    # Pong in few large patches: there is little to see, and many frames are needed to see enough of it.
    _trained("pong", 48, 16, d_model=160, num_layers=4, num_actions=6),
    # Its last layer is global: what a dilated layer brings back is part of what it is trained for.
    _trained("recall", 16, 16, d_model=96, num_layers=3, num_actions=1, global_period=3),
    # Waypoint-1.5 geometry with random weights, for memory and speed.
    _waypoint("waypoint_360p", 16, 32),
    _waypoint("waypoint_720p", 32, 64),
)

PRESETS: dict[str, ModelConfig] = {config.name: config for config in _PRESETS}
"""Presets by name."""


def preset(name: str) -> ModelConfig:
    """The preset ``name``; ``ValueError`` naming those that exist."""
    if name not in PRESETS:
        raise ValueError(f"model={name!r}: expected one of {', '.join(PRESETS)}")
    return PRESETS[name]
