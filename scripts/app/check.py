"""What a composed config must satisfy before anything runs, and the values that its nulls stand for.

No torch, unless the config asks for a device that only torch can tell about: a person who mistyped a number waits for
nothing. Every refusal is a ``BadInput`` naming key, value and what is allowed.
"""

from __future__ import annotations

import copy
import dataclasses
import importlib.util
import math
import operator
import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import psutil

from model.checkpoint import check_geometry
from model.config import ModelConfig
from model.data.names import check_request
from ringkv.config import PagedKVConfig
from ringkv.memory import DTYPE_BYTES
from scripts.app.errors import BadInput
from scripts.app.geometry import fill_in_geometry, model_config
from scripts.app.schema import JobKnobs, RolloutConfig
from scripts.app.strategies import POOL_KNOBS, STRATEGIES, kv_bytes, kv_config, working_bytes

TRACKING_MODES = ("offline", "online", "disabled")
PIXEL_CHANNELS = (1, 3)
MAX_SEED = 2**63 - 1
GIB = 1024.0**3


def effective(config: RolloutConfig, *, budget_bytes: float = math.inf, on_this_machine: bool = True) -> RolloutConfig:
    """A copy of ``config`` that says what it means: nulls replaced by the values they stand for, paths made absolute.

    budget_bytes: of KV, at which the run will be ended, so that it need not fit beyond them. on_this_machine: False for
    a job that is only calculated, and need neither fit into this machine nor find its device here. ``BadInput`` for the
    first value that cannot work. ``config`` is not changed.
    """
    config = copy.deepcopy(config)
    _check_choices(config)
    _check_counts(config)
    model = model_config(config)
    _check_data(config, model)
    _check_strategy(config, model)
    fill_in_geometry(config, model)
    config.data.folder = absolute(config.data.folder)
    if config.data.path is not None:
        config.data.path = absolute(config.data.path)
    if config.checkpoint not in (None, "auto"):
        config.checkpoint = absolute(config.checkpoint)
        try:
            check_geometry(config.checkpoint, model)
        except (OSError, ValueError) as error:
            raise BadInput(f"{error}; expected auto, null or a checkpoint that fits") from error
    if on_this_machine:
        _check_memory(config, model, budget_bytes)
        _check_device(config.device)
    return config


def job_knobs(config: JobKnobs) -> dict[str, Any]:
    """The knobs that every job that rolls out has, by name."""
    return {field.name: getattr(config, field.name) for field in dataclasses.fields(JobKnobs)}


def take_over(config: JobKnobs, rollout: JobKnobs, *, but: Sequence[str] = ()) -> None:
    """Give ``config`` the values that its ``job_knobs`` have in a checked ``rollout``, all but those named."""
    for key, value in job_knobs(rollout).items():
        if key not in but:
            setattr(config, key, value)


def check_count(key: str, value: int | None, lowest: int, highest: int | None) -> None:
    """``BadInput`` unless the integer is null or within its bounds; highest None: no bound."""
    if value is not None and (value < lowest or (highest is not None and value > highest)):
        allowed = f">= {lowest}" if highest is None else f"from {lowest} to {highest}"
        raise BadInput(f"{key}={value}: expected an integer {allowed}")


def usable_cores() -> int:
    """Cores that this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _check_choices(config: RolloutConfig) -> None:
    for key, value, allowed in (
        ("kv.strategy", config.kv.strategy, tuple(STRATEGIES)),
        ("dtype", config.dtype, tuple(DTYPE_BYTES)),
        ("kv_dtype", config.kv_dtype, (*DTYPE_BYTES, None)),
        ("tracking.mode", config.tracking.mode, TRACKING_MODES),
    ):
        if value not in allowed:
            raise BadInput(f"{key}={value}: expected one of {', '.join(map(_text, allowed))}")
    if config.kv_dtype is None:
        config.kv_dtype = config.dtype
    if not config.tracking.project.strip():
        raise BadInput(f"tracking.project={config.tracking.project!r}: expected a name")
    for key, number in (
        ("target_fps", config.target_fps),
        ("sweep.timeout_s", config.sweep.timeout_s),
        ("sweep.memory_gib", config.sweep.memory_gib),
    ):
        if number is not None and not (math.isfinite(number) and number > 0):
            raise BadInput(f"{key}={number}: expected a number > 0")


def _check_counts(config: RolloutConfig) -> None:
    cores = os.cpu_count() or 1
    for key, value, lowest, highest in (
        ("ring_frames", config.ring_frames, 1, None),
        ("ring_buckets", config.ring_buckets, 1, None),
        ("dilation", config.dilation, 1, None),
        ("global_period", config.global_period, 1, None),
        ("tokens_per_frame", config.tokens_per_frame, 1, None),
        ("num_sessions", config.num_sessions, 1, None),
        ("num_frames", config.num_frames, 1, None),
        ("context_frames", config.context_frames, 0, None),
        ("warmup", config.warmup, 0, None),
        ("snapshot_every", config.snapshot_every, 0, None),
        ("repeats", config.repeats, 1, None),
        ("repeat", config.repeat, 0, None),
        ("seed", config.seed, 0, MAX_SEED),
        ("threads", config.threads, 1, cores),
    ):
        check_count(key, value, lowest, highest)
    if config.ring_buckets is None:
        config.ring_buckets = config.ring_frames
    if config.ring_buckets > config.ring_frames:
        raise BadInput(f"ring_buckets={config.ring_buckets}: expected at most ring_frames={config.ring_frames}")
    if config.num_frames is None:
        config.num_frames = max(3 * config.ring_frames, config.context_frames + config.ring_frames)
    if config.context_frames >= config.num_frames:
        raise BadInput(f"context_frames={config.context_frames}: expected fewer than num_frames={config.num_frames}")
    if config.threads is None:
        config.threads = usable_cores()


def _check_strategy(config: RolloutConfig, model: ModelConfig) -> None:
    """Refuse what the strategy does not have, and give its knobs the values that their nulls stand for."""
    kv, strategy = config.kv, STRATEGIES[config.kv.strategy]
    for knob in ("window", *POOL_KNOBS):
        value = getattr(kv, knob)
        if value is not None and knob not in strategy.knobs:
            having = ", ".join(name for name, other in STRATEGIES.items() if knob in other.knobs)
            raise BadInput(f"kv.{knob}={str(value).lower()}: kv={kv.strategy} has no such knob; expected kv={having}")
        if value is not None and knob in POOL_KNOBS and value < 1:
            raise BadInput(f"kv.{knob}={value}: expected an integer >= 1")
    if config.attention not in strategy.reads:
        raise BadInput(f"attention={config.attention}: kv={kv.strategy} has {', '.join(strategy.reads)}")
    if not strategy.dilates and max(model.layer_dilations(config.dilation)) > 1:
        raise BadInput(f"dilation={config.dilation}: kv={kv.strategy} has no dilated layers; expected dilation=1")
    if kv.strategy == "hf_sliding":
        if config.ring_buckets == 1:
            key = "ring_frames" if config.ring_frames == 1 else "ring_buckets"
            raise BadInput(f"{key}=1: kv=hf_sliding evicts nothing in a window of one frame; expected 2 or more")
        if importlib.util.find_spec("transformers") is None:
            raise BadInput("kv=hf_sliding: transformers is not installed; expected pip install 'ringkv[peers]'")
    if "window" in strategy.knobs:
        kv.window = bool(kv.window)
    if "max_frames" in strategy.knobs and kv.max_frames is None:
        kv.max_frames = config.num_frames
    geometry = kv_config(config, model)
    if isinstance(geometry, PagedKVConfig):
        kv.page_tokens, kv.num_pages = geometry.page_tokens, geometry.num_pages


def _check_data(config: RolloutConfig, model: ModelConfig) -> None:
    data = config.data
    assert config.num_frames is not None
    if data.channels is None and model.channels not in PIXEL_CHANNELS and data.name != "synthetic":
        raise BadInput(
            f"data={data.name}: model={model.name} takes latents of {model.channels} channels, which only "
            "data=synthetic has"
        )
    try:
        check_request(
            data.name,
            num_frames=config.num_frames,
            channels=model.channels,
            height=model.height,
            width=model.width,
            seed=config.seed,
            index=config.num_sessions - 1,
            path=data.path,
        )
    except ValueError as error:
        raise BadInput(str(error)) from error
    folder = Path(absolute(data.folder))
    if folder.exists() and not (folder.is_dir() and os.access(folder, os.W_OK)):
        raise BadInput(f"data.folder={data.folder}: expected a folder to write to")


def _check_memory(config: RolloutConfig, model: ModelConfig, budget_bytes: float) -> None:
    """Refuse what cannot fit into this machine before the kernel ends the process for it."""
    if config.device != "cpu":
        return  # torch says so by itself when an accelerator is full, and nothing is killed
    kv = min(kv_bytes(config, model), budget_bytes) + working_bytes(config, model)
    weights = weight_bytes(config, model)
    available = psutil.virtual_memory().total
    if kv + weights > available:
        knob = STRATEGIES[config.kv.strategy].size_knob
        raise BadInput(
            f"{knob}={operator.attrgetter(knob)(config)} num_sessions={config.num_sessions}: {kv / GIB:.1f} GiB of KV "
            f"and {weights / GIB:.1f} GiB of weights; expected at most the {available / GIB:.1f} GiB of this machine"
        )


def weight_bytes(config: JobKnobs, model: ModelConfig) -> int:
    """Bytes of the weights: drawn in fp32, then cast."""
    return model.num_parameters * max(4, DTYPE_BYTES[config.dtype])


def _check_device(device: str) -> None:
    if device == "cpu":
        return
    index = re.fullmatch(r"cuda(?::(\d+))?", device)
    if index is None:
        raise BadInput(f"device={device}: expected cpu, cuda or cuda:N")
    import torch

    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if int(index.group(1) or 0) >= count:
        there = f"cpu or one of {count} CUDA devices" if count else "cpu, as there is no CUDA device here"
        raise BadInput(f"device={device}: expected {there}")


def absolute(path: str) -> str:
    """``path`` from the launch folder, ``~`` expanded."""
    return os.path.abspath(os.path.expanduser(path))


def _text(value: str | None) -> str:
    return "null" if value is None else value
