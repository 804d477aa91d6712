"""Everything that decides what a training run computes, as plain numbers. No torch."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass

MAX_SEED = 2**63 - 1


@dataclass
class Recipe:
    """Knobs of a training run; its result follows from them, the data and the number of threads.

    steps: optimizer steps. batch, frames: sequences of a step and frames predicted in each. long_batch, long_frames:
    the same for the share ``long_share`` of steps that show a long past. min_ring_frames, max_ring_frames: rings of
    that many frames are drawn, log-uniformly, one per step. long_min_ring_frames: above 0, steps that show a long past,
    which alone fill a ring of many frames, draw theirs uniformly from here up. max_dilation, dilated_share: in that
    share of steps the model's global layers keep every 2nd to ``max_dilation``-th frame. max_start: sequences begin at
    a random clock up to it. history_noise: half of each batch, rounded down, has noise of up to this standard deviation
    on its clean frames, the rest has its history as it is.
    object_weight: weight in the loss of pixels that differ from the background by more than ``object_threshold``
    (frames are in [-1, 1]). rollout_from: the step from which training is closer to a rollout. From then on the share
    ``own_share`` of the clean frames in the noisy half is what the model itself makes of them in one pass; what moves
    in that half is fainter by up to the share ``history_fade``, from place to place and frame to frame another, because
    a rollout that is unsure of a sprite draws it faint and has to find back to all of it; with ``late_object_weight``
    above 0 that is the object weight: a heavy one teaches where a small object goes, a light one how sure to be of it;
    and with ``object_reach`` above 0 the object weight goes to all pixels that an object of the frame before may reach,
    that far away: a weight that looks at the frame to be predicted teaches fastest, but rewards painting an object
    wherever it might be. unpredictable_weight: weight of frames that nothing in view announces.
    start_gain: above 0, the model starts from the background of its data, which then is nothing to learn or to see
    past, and sees what differs from it so many times larger. bf16: the products of the blocks, and those of Muon, take
    bf16; attention, norms and the residual stream stay as they are.
    matrix_lr, momentum: of Muon, which steps the matrices of the blocks. lr, weight_decay: of AdamW, which steps the
    rest. warmup_steps: the rates rise linearly; then they stay until ``flat_share`` of all steps and fall linearly to
    ``final_lr`` of their height. clip: highest norm of the gradient. ema: decay of the average of the weights, which is
    what is kept. seed: of weights, data and noise.
    """

    steps: int = 3000
    batch: int = 4
    frames: int = 8
    long_batch: int = 2
    long_frames: int = 36
    long_share: float = 0.1
    long_min_ring_frames: int = 0
    min_ring_frames: int = 4
    max_ring_frames: int = 32
    max_dilation: int = 1
    dilated_share: float = 0.0
    max_start: int = 200
    history_noise: float = 0.15
    history_fade: float = 0.0
    object_weight: float = 16.0
    object_threshold: float = 0.1
    rollout_from: int = 0
    own_share: float = 0.0
    object_reach: int = 0
    late_object_weight: float = 0.0
    unpredictable_weight: float = 1.0
    start_gain: float = 0.0
    bf16: bool = False
    matrix_lr: float = 0.02
    momentum: float = 0.95
    lr: float = 2e-3
    weight_decay: float = 0.01
    warmup_steps: int = 50
    flat_share: float = 0.6
    final_lr: float = 0.02
    clip: float = 1.0
    ema: float = 0.998
    seed: int = 0

    def check(self) -> None:
        """``ValueError``, one line that names the knob, for the first value that cannot work."""
        counts = ("steps", "batch", "frames", "long_batch", "long_frames", "min_ring_frames", "max_dilation")
        lowest = dict.fromkeys(counts, 1) | {"max_ring_frames": self.min_ring_frames}
        lowest |= {
            "rollout_from": 0,
            "long_min_ring_frames": 0,
            "object_reach": 0,
            "max_start": 0,
            "warmup_steps": 0,
            "seed": 0,
        }
        for key, least in lowest.items():
            if getattr(self, key) < least:
                raise ValueError(f"{key}={getattr(self, key)}: expected an integer >= {least}")
        if self.seed > MAX_SEED:
            raise ValueError(f"seed={self.seed}: expected an integer <= {MAX_SEED}")
        if self.long_min_ring_frames > self.max_ring_frames:
            raise ValueError(
                f"long_min_ring_frames={self.long_min_ring_frames}: expected at most max_ring_frames="
                f"{self.max_ring_frames}"
            )
        for key in (
            "long_share",
            "history_fade",
            "dilated_share",
            "own_share",
            "momentum",
            "flat_share",
            "final_lr",
            "ema",
        ):
            if not 0 <= getattr(self, key) <= 1:
                raise ValueError(f"{key}={getattr(self, key)}: expected 0 to 1")
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if isinstance(value, float) and not (math.isfinite(value) and value >= 0):
                raise ValueError(f"{field.name}={value}: expected a finite number >= 0")
        if self.dilated_share > 0 and self.max_dilation < 2:
            raise ValueError(f"max_dilation={self.max_dilation}: expected at least 2 with dilated_share > 0")

    def rate(self, step: int) -> float:
        """Factor on the learning rates of step ``step``, counted from 0."""
        if step < self.warmup_steps:
            return (step + 1) / self.warmup_steps
        flat = self.flat_share * self.steps
        if step < flat or self.steps <= flat:
            return 1.0
        return 1.0 - (1.0 - self.final_lr) * (step - flat) / (self.steps - flat)
