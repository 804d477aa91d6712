"""Every knob of a job: its type, its default and what it means. The command line knows these and no others.

``null`` means "derived": ``check.effective`` fills it in, and the value it chose is what a run records.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from hydra.core.config_store import ConfigStore
from omegaconf import MISSING

# Annotations are evaluated by OmegaConf, at run time: everything they name must be importable here.


@dataclass
class PoolKnobs:
    """How much a strategy that preallocates for frames to come has room for; null where the strategy has no such knob.

    page_tokens: tokens of a page; null: 16. num_pages: pages of each layer's pool, shared by all sessions; null: what
    num_frames frames of every session take. max_frames: frames preallocated for each session; null: num_frames.
    """

    page_tokens: int | None = None
    num_pages: int | None = None
    max_frames: int | None = None


@dataclass
class KVKnobs(PoolKnobs):
    """conf/kv: how the past is kept. strategy: key of ``strategies.STRATEGIES``.

    window: true for the frames that a ring would show; null or false for all.
    """

    strategy: str = MISSING
    window: bool | None = None


@dataclass
class ModelKnobs:
    """conf/model: a preset of ``model.config`` and changes to it; null keeps the preset's value."""

    preset: str = MISSING
    d_model: int | None = None
    num_layers: int | None = None
    num_heads: int | None = None
    num_kv_heads: int | None = None
    head_dim: int | None = None
    mlp_ratio: int | None = None


@dataclass
class DataKnobs:
    """conf/data: the real frames that context and ground truth come from.

    name: freeway, pong, breakout (recorded from the emulator), video (a file or a folder of images) or synthetic.
    channels: 3 or 1 for pixels; null: the model preset's. height, width: pixels; null: the model preset's. path: of
    the video. folder: where recordings are cached. The model follows the data.
    """

    name: str = MISSING
    channels: int | None = None
    height: int | None = None
    width: int | None = None
    path: str | None = None
    folder: str = "data"


@dataclass
class TrackingKnobs:
    """conf/tracking: the copy of a run's record in Weights & Biases.

    mode: offline, online or disabled. group: null for none, in a sweep its folder's name.
    """

    mode: str = MISSING
    project: str = "ringkv"
    group: str | None = None


@dataclass
class SweepKnobs:
    """What each point of a sweep may use. memory_gib: resident memory of its processes; null: 80 % of the machine's."""

    timeout_s: float = 3600.0
    memory_gib: float | None = None


@dataclass
class JobKnobs:
    """Knobs of every job that rolls out.

    ring_frames: frame slots per layer, in every layer. ring_buckets: slots addressed; null: ring_frames.
    dilation: a global layer keeps every dilation-th frame: its horizon is ring_buckets * dilation frames.
    global_period: every such layer is global; null: the model preset's. tokens_per_frame: square patches of a frame;
    null: the model preset's.
    num_sessions: rollouts side by side. num_frames: frames of each, context included; null: 3 * ring_frames, so that a
    local layer's ring wraps twice. context_frames: real frames that prime the cache first.
    kv_dtype: dtype of cached K and V; null: dtype. checkpoint: auto (shipped weights that fit, else random weights), a
    path, or null (random weights). seed: of weights, noise and recordings. threads: of torch; null: all usable cores.
    device: cpu, cuda, cuda:N. dtype: of the weights. compile: torch.compile the model. attention: the read path.
    sigmas: noise levels, from at most 1 down to 0; null: the model preset's. warmup: generating steps that are run but
    not measured. target_fps: frames per second and session that count as on time.
    """

    ring_frames: int = 32
    ring_buckets: int | None = None
    dilation: int = 8
    global_period: int | None = None
    tokens_per_frame: int | None = None
    num_sessions: int = 1
    num_frames: int | None = None
    context_frames: int = 8
    kv_dtype: str | None = None
    model: ModelKnobs = field(default_factory=ModelKnobs)
    checkpoint: str | None = "auto"
    data: DataKnobs = field(default_factory=DataKnobs)
    seed: int = 0
    threads: int | None = None
    device: str = "cpu"
    dtype: str = "float32"
    compile: bool = False
    attention: str = "auto"
    sigmas: list[float] | None = None
    warmup: int = 1
    target_fps: float = 15.0
    tracking: TrackingKnobs = field(default_factory=TrackingKnobs)


@dataclass
class RolloutConfig(JobKnobs):
    """Knobs of scripts/rollout.py. profile: write a Chrome trace."""

    kv: KVKnobs = field(default_factory=KVKnobs)
    profile: bool = False
    sweep: SweepKnobs = field(default_factory=SweepKnobs)


@dataclass
class CompareConfig(JobKnobs):
    """Knobs of scripts/compare.py.

    strategies: files of conf/kv, ring among them. kv: for those that have such knobs. block_frames: frames that one
    strategy makes before the next has its turn. budget_mib: KV memory that each may hold at once, MiB; null: any.
    equality_frames: frames of the canonical rollouts that say who agrees with whom, at most num_frames; 0: none; null:
    enough for a local ring to wrap. ledger: count the bytes that a frame moves. warmup: generated frames of a rollout
    of its own that goes before the measured one.
    """

    strategies: list[str] = field(default_factory=list)
    kv: PoolKnobs = field(default_factory=PoolKnobs)
    block_frames: int = 8
    budget_mib: float | None = None
    equality_frames: int | None = None
    ledger: bool = True


@dataclass
class PlanConfig(JobKnobs):
    """Knobs of scripts/plan.py, which calculates and runs nothing.

    num_frames: length of the rollout that is planned for. strategies: files of conf/kv, ring among them. kv: for those
    that have such knobs. budget_gib: memory of the device. workspace_share: of it, left to activations and the
    allocator. device_tflops: its peak at this dtype, 10**12 per second. utilisation: of the peak that a model reaches.
    memory_gb_s, link_gb_s, disk_gb_s: 10**9 bytes per second of the device's memory, of its link to the host, and of
    the disk.
    """

    strategies: list[str] = field(default_factory=list)
    kv: PoolKnobs = field(default_factory=PoolKnobs)
    budget_gib: float = 80.0
    workspace_share: float = 0.1
    device_tflops: float = 989.0
    utilisation: float = 0.4
    memory_gb_s: float = 3350.0
    link_gb_s: float = 55.0
    disk_gb_s: float = 5.0


SCHEMAS: dict[str, type[JobKnobs]] = {"rollout": RolloutConfig, "compare": CompareConfig, "plan": PlanConfig}
"""The config of each job, by the name of its file in conf/."""


def register() -> None:
    """Make the schemas known to Hydra, as ``rollout_schema`` and so on."""
    for name, schema in SCHEMAS.items():
        ConfigStore.instance().store(f"{name}_schema", node=schema)
