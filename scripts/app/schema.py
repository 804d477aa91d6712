"""Every knob of a job: its type, its default and what it means. The command line knows these and no others.

``null`` means "derived": ``check.effective`` fills it in, and the value it chose is what a run records.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from hydra.core.config_store import ConfigStore
from omegaconf import MISSING

from model.training.recipe import Recipe

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

    mode: offline, online or disabled. group: null for the name of the run's folder, in a sweep of the sweep's.
    """

    mode: str = MISSING
    project: str = "ringkv"
    group: str | None = None


@dataclass
class SweepKnobs:
    """A sweep, and what each of its points may use.

    timeout_s: of its process. memory_gib: resident memory of its processes; null: 80 % of the machine's. resume: folder
    of a sweep that is to be finished: points that are done there, with this config and this source, are kept. dry_run:
    list the points with their memory and arithmetic, and run none.
    """

    timeout_s: float = 3600.0
    memory_gib: float | None = None
    resume: str | None = None
    dry_run: bool = False


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
class RunKnobs:
    """resume: folder of an unfinished run, to go on there where it stopped. Its config.json then has the knobs."""

    resume: str | None = None


@dataclass
class RolloutConfig(JobKnobs):
    """Knobs of scripts/rollout.py.

    snapshot_every: frames from one snapshot to the next, from which the run can be resumed; 0: none.
    profile: write a Chrome trace. repeats: how often each point of a sweep is run, above 1 a sweep by itself; a repeat
    is a point of its own, with its number added to the seed. repeat: that number, from 0; of a single run a mere label.
    """

    kv: KVKnobs = field(default_factory=KVKnobs)
    snapshot_every: int = 16
    rollout: RunKnobs = field(default_factory=RunKnobs)
    profile: bool = False
    repeats: int = 1
    repeat: int = 0
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


@dataclass
class TrainConfig(Recipe):
    """Knobs of scripts/train.py, besides those of the recipe (``model.training.recipe``).

    recipe: name under which the weights are kept. model, data, global_period, tokens_per_frame, sigmas: as in a
    rollout. clips: recordings to train on; of data=loops, loops of each length. clip_frames: frames of a recording.
    resume: folder of a run of the same recipe, to go on where its last state was saved. stop: steps to stop after for
    now, of ``steps``; null: all. out: file that gets the weights, besides ``checkpoint.safetensors`` in the run's
    folder; null: none. save_every, evaluate_every: steps between states and between rollouts on held-out data; 0: only
    at the end. threads: of torch; null: all usable cores.
    """

    recipe: str = MISSING
    model: ModelKnobs = field(default_factory=ModelKnobs)
    data: DataKnobs = field(default_factory=DataKnobs)
    global_period: int | None = None
    tokens_per_frame: int | None = None
    sigmas: list[float] | None = None
    clips: int = 6
    clip_frames: int = 1900
    resume: str | None = None
    stop: int | None = None
    out: str | None = None
    save_every: int = 250
    evaluate_every: int = 500
    threads: int | None = None
    tracking: TrackingKnobs = field(default_factory=TrackingKnobs)


@dataclass
class ProbeKnobs:
    """conf/probe: what is asked of a model and the way it keeps its past; null where a probe has no such knob.

    name: recall, return, fidelity or drift. clips: held-out loops, circuits or recordings at every point.
    loop_frames: lengths of loops. rings, dilations: values of ring_frames and dilation to try. max_gap: longest return
    of the oracle reader, frames. gaps: returns that the trained model is asked for, even numbers of frames. samples:
    rollouts of each of the first ``sampled_clips`` clips, whose mean is judged too. replays: perturbed ones.
    segment_frames: of a drift table's row.
    candidate_kv, candidate_attention, candidate_kv_dtype: what the candidate of a drift differs in: a file of conf/kv,
    a value of attention, one of kv_dtype; null: as the reference.
    """

    name: str = MISSING
    clips: int | None = None
    loop_frames: list[int] | None = None
    rings: list[int] | None = None
    dilations: list[int] | None = None
    max_gap: int | None = None
    gaps: list[int] | None = None
    samples: int | None = None
    sampled_clips: int | None = None
    replays: int | None = None
    segment_frames: int | None = None
    candidate_kv: str | None = None
    candidate_attention: str | None = None
    candidate_kv_dtype: str | None = None


@dataclass
class ProbeConfig(JobKnobs):
    """Knobs of scripts/probe.py. num_sessions: rollouts in a batch. The pools of kv=... are sized by the probe."""

    kv: KVKnobs = field(default_factory=KVKnobs)
    probe: ProbeKnobs = field(default_factory=ProbeKnobs)


@dataclass
class ServeConfig(JobKnobs):
    """Knobs of scripts/serve_sim.py, which simulates time and runs no model.

    num_frames: of a request, on average. policies: of ringkv.policies. pool_sizes: sessions. arrivals_per_min: requests
    per minute. minutes: for how long they come. burst_s, pause_s: for how long a visitor wants frames and then none, on
    average, seconds; pause_s=0: no pauses. deadline_s: after which a request ends wherever it is; null: none.
    quantum_frames: of lru_park. device_tflops, utilisation, link_gb_s: as in a plan.
    """

    kv: KVKnobs = field(default_factory=KVKnobs)
    policies: list[str] = field(default_factory=list)
    pool_sizes: list[int] = field(default_factory=list)
    arrivals_per_min: list[float] = field(default_factory=list)
    minutes: float = 3.0
    burst_s: float = 4.0
    pause_s: float = 4.0
    deadline_s: float | None = None
    quantum_frames: int = 16
    device_tflops: float = PlanConfig.device_tflops
    utilisation: float = PlanConfig.utilisation
    link_gb_s: float = PlanConfig.link_gb_s


@dataclass
class ForksConfig(JobKnobs):
    """Knobs of scripts/forks.py.

    fork_frame: the first frame that the forks make differently; null: context_frames + 8. actions: what each fork does
    from then on, by name. out: the GIF, besides the one in the run's folder; null: none.
    """

    kv: KVKnobs = field(default_factory=KVKnobs)
    fork_frame: int | None = None
    actions: list[str] = field(default_factory=list)
    out: str | None = None


@dataclass
class GridKnobs:
    """Points of the levels reads and peers of scripts/bench.py: tokens per frame, frames of a window, rows of a step.

    threads: of torch; those above the machine's cores are left out.
    """

    tokens: list[int] = field(default_factory=lambda: [16, 64, 128, 256])
    windows: list[int] = field(default_factory=lambda: [16, 64])
    sessions: list[int] = field(default_factory=lambda: [1, 4])
    dtypes: list[str] = field(default_factory=lambda: ["float32", "bfloat16"])
    threads: list[int] = field(default_factory=lambda: [1, 2])


@dataclass
class BenchConfig(JobKnobs):
    """Knobs of scripts/bench.py. Those of the job are of the steps that the levels frame, rollout and steady take.

    levels: some of reads, peers, frame, rollout, steady. grid: of reads and peers. strategies: files of conf/kv that
    the level rollout runs, ring among them. kv: for those that have such knobs. rollout_sessions: rollouts side by side
    there. budget_s: seconds that sampling may take; preparation, and the few samples that every point gets, come on
    top. quick: a few points only, to see that everything runs; its figures say nothing.
    """

    levels: list[str] = field(default_factory=list)
    grid: GridKnobs = field(default_factory=GridKnobs)
    strategies: list[str] = field(default_factory=list)
    kv: PoolKnobs = field(default_factory=PoolKnobs)
    rollout_sessions: list[int] = field(default_factory=lambda: [1, 2, 4, 8])
    budget_s: float = 600.0
    quick: bool = False


SCHEMAS: dict[str, type[Any]] = {
    "rollout": RolloutConfig,
    "compare": CompareConfig,
    "plan": PlanConfig,
    "probe": ProbeConfig,
    "forks": ForksConfig,
    "serve_sim": ServeConfig,
    "train": TrainConfig,
    "bench": BenchConfig,
}
"""The config of each job, by the name of its file in conf/."""


def register() -> None:
    """Make the schemas known to Hydra, as ``rollout_schema`` and so on."""
    for name, schema in SCHEMAS.items():
        ConfigStore.instance().store(f"{name}_schema", node=schema)
