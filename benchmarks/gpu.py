"""Milliseconds per frame on a GPU, eager, compiled and captured, and what its reads get of the memory's bandwidth.

Command: ``python benchmarks/gpu.py``; writes ``benchmarks/<device>.json``. Never run so far: no GPU was at hand. It has
been tried on a CPU with a small model (``--device cpu --models tiny``), where nothing is captured.

Waypoint geometries, random weights in bf16, a ring of 16 frames in every layer, global layers at dilation 8. A frame is
what ``StepRunner.step`` takes to make one frame of every session, four denoise passes and the committing one, with the
device synchronised before and after. Every session starts past the wrap, from a state at frame ``START``; the modes
take turns step by step; medians, with the 5th and the 95th percentile. Building and warming up are reported apart.

The read is ``attend`` of layer 0 with all sessions as rows, a captured graph of ``READS`` of them: bytes of K and V
that the rows see, over the time, the write of one frame included. The copy is ``Tensor.copy_`` of 1 GiB on the same
device: bytes read and written, over its time.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from model.config import ModelConfig, preset
from model.sampler import FrameSampler
from model.transformer import FrameTransformer, compile_regions
from ringkv import (
    EngineResourceInfo,
    FrameStep,
    KVSpec,
    RingKVConfig,
    RingKVLayerConfig,
    RolloutRequest,
    RolloutState,
    StepContext,
    StepRunner,
)
from ringkv.graphs import CapturedSteps
from ringkv.harness.machine import machine_card
from ringkv.horizon import visible_frames
from ringkv.ring.manager import RingKVManager

RING_FRAMES, DILATION = 16, 8
START = 4 * RING_FRAMES * DILATION - 1
WARM_UP = 3
READS = 20
MODES = ("eager", "compiled", "captured")


def main() -> None:
    """Measure everything, print a line per point, write the file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--models", nargs="+", default=["waypoint_360p", "waypoint_720p"])
    parser.add_argument("--sessions", nargs="+", type=int, default=[1, 4])
    parser.add_argument("--frames", type=int, default=32)
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    device = torch.device(arguments.device)
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
    points: list[dict[str, Any]] = []
    for model in arguments.models:
        for sessions in arguments.sessions:
            try:
                point = measure(preset(model), sessions, arguments.frames, device)
            except (RuntimeError, torch.OutOfMemoryError) as error:  # a point that fails is a row
                point = {"error": f"{type(error).__name__}: {error}"}
            points.append({"model": model, "sessions": sessions} | point)
            print(json.dumps(points[-1]))
    record = {
        "device": name,
        "machine": machine_card(str(device), packages=("ringkv", "model")),
        "ring_frames": RING_FRAMES,
        "dilation": DILATION,
        "dtype": "bfloat16",
        "frames": arguments.frames,
        "points": points,
    }
    path = arguments.out or Path(__file__).parent / f"{name.lower().replace(' ', '_')}.json"
    path.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    print(path)


def measure(config: ModelConfig, sessions: int, frames: int, device: torch.device) -> dict[str, Any]:
    """Every mode and both bandwidths of one geometry."""
    runners, ahead_s = {}, {}
    for mode in MODES:
        started = time.perf_counter()
        runners[mode] = build_runner(config, sessions, frames, device, mode)
        synchronize(device)
        ahead_s[mode] = time.perf_counter() - started
    times: dict[str, list[float]] = {mode: [] for mode in MODES}
    for step in range(WARM_UP + frames):
        for mode, runner in runners.items():
            elapsed = timed(runner.step, device)
            assert not runner.failed, runner.failed
            if step >= WARM_UP:
                times[mode].append(1000 * elapsed)
    read, copy = read_bandwidth(runners["captured"], device), copy_bandwidth(device)
    return {
        "ms_per_frame": {mode: spread(values) for mode, values in times.items()},
        "build_and_warm_up_s": ahead_s,
        "read_gb_s": read / 1e9,
        "copy_gb_s": copy / 1e9,
        "read_over_copy": read / copy,
    }


def build_runner(config: ModelConfig, sessions: int, frames: int, device: torch.device, mode: str) -> StepRunner:
    """A runner with all its sessions loaded at frame ``START``."""
    network = FrameTransformer(config, seed=0).to(device=device, dtype=torch.bfloat16).eval()
    if mode != "eager":
        compile_regions(network)
    layers = tuple(
        RingKVLayerConfig(ring_frames=RING_FRAMES, ring_buckets=RING_FRAMES, pinned_dilation=dilation)
        for dilation in config.layer_dilations(DILATION)
    )
    kv = RingKVConfig(
        num_layers=config.num_layers,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        num_qo_heads=config.num_heads,
        tokens_per_frame=config.tokens_per_frame,
        num_sessions=sessions,
        padding_session=sessions > 2,
        layers=layers,
    )
    spec = KVSpec(resource_key="kv", config=kv)
    read = "flex" if mode == "captured" else "auto"
    info = EngineResourceInfo(device=device, kv_dtype=torch.bfloat16, attention=read)
    resource, sampler = spec.resource_class.build(spec, info), FrameSampler(network)
    captured = None
    if mode == "captured":
        captured = CapturedSteps(resource, sampler, sessions)
        captured.warm_up()
    runner = StepRunner(resource, sampler, captured)
    num_frames = START + 1 + WARM_UP + frames
    for stream in range(sessions):
        request = RolloutRequest(
            rid=f"session-{stream}",
            seed=0,
            stream=stream,
            num_frames=num_frames,
            context=torch.zeros(0, *sampler.frame_shape),
            actions=torch.zeros(num_frames, dtype=torch.int64),
        )
        runner.submit(request, wrapped_state(resource, stream, sampler.fingerprint))
    return runner


def wrapped_state(resource: Any, stream: int, fingerprint: str) -> RolloutState:
    """A state whose rings are full of noise at clock ``START``."""
    resource.ingest_request("donor")
    outcome = resource.admit(FrameStep(frames=(("donor", 0),)), StepContext(request_ids=("donor",)))
    assert outcome.ok, outcome.reason
    state = resource.get_state("donor")
    resource.remove_request("donor")
    state["clock"] = START
    generator = torch.Generator().manual_seed(stream)
    tokens = resource.config.tokens_per_frame
    for kv, written in state["layers"]:
        noise = torch.randn(kv.shape, generator=generator)
        kv[:, :, :, :-tokens] = noise[:, :, :, :-tokens].to(kv)
        written[:] = True
    return RolloutState(state, 0, stream, START + 1, START + 1, fingerprint)


def read_bandwidth(runner: StepRunner, device: torch.device) -> float:
    """Bytes per second of K and V that the reads of one layer take in, all sessions in a step."""
    resource = runner.resource
    assert isinstance(resource, RingKVManager)
    config = resource.config
    rids = runner.resident
    frames = tuple((rid, clock + 1) for rid in rids if (clock := runner.state_of(rid).cache["clock"]) is not None)
    step, ctx = FrameStep(frames=frames), StepContext(request_ids=rids)
    outcome = resource.admit(step, ctx)
    assert outcome.ok, outcome.reason
    resource.plan(step, ctx)
    frame_pos = torch.tensor([frame for _, frame in frames], device=device)
    tokens = config.tokens_per_frame
    q, k, v = (
        torch.randn(len(rids), heads, tokens, config.head_dim, device=device, dtype=torch.bfloat16)
        for heads in (config.num_qo_heads, config.num_kv_heads, config.num_kv_heads)
    )

    def reads() -> None:
        for _ in range(READS):
            resource.attend(q, k, v, 0, frame_pos, commit=False)

    with torch.no_grad():
        run = graphed(reads, device)
        seconds = statistics.median(timed(run, device) for _ in range(WARM_UP + 10)) / READS
    seen = sum(len(visible_frames(config.layers[0], frame)) + 1 for _, frame in frames)
    return seen * tokens * 2 * config.num_kv_heads * config.head_dim * k.element_size() / seconds


def graphed(call: Callable[[], None], device: torch.device) -> Callable[[], None]:
    """``call`` as a captured graph's replay on a GPU, itself elsewhere."""
    call()
    if device.type != "cuda":
        return call
    synchronize(device)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    return graph.replay


def copy_bandwidth(device: torch.device) -> float:
    """Bytes per second, read and written, of a copy of 1 GiB."""
    source = torch.ones(1 << 30, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    seconds = statistics.median(timed(lambda: target.copy_(source), device) for _ in range(WARM_UP + 10))
    return 2 * source.nbytes / seconds


def timed(call: Callable[[], object], device: torch.device) -> float:
    """Seconds of ``call``, the device idle before and after."""
    synchronize(device)
    started = time.perf_counter()
    call()
    synchronize(device)
    return time.perf_counter() - started


def synchronize(device: torch.device) -> None:
    """Wait for the device."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def spread(values: list[float]) -> dict[str, float]:
    """Median, 5th and 95th percentile."""
    ordered = sorted(values)
    return {
        "p50": statistics.median(ordered),
        "p5": ordered[round(0.05 * (len(ordered) - 1))],
        "p95": ordered[round(0.95 * (len(ordered) - 1))],
    }


if __name__ == "__main__":
    main()
