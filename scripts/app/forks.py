"""One rollout, forked: the original follows the recorded actions, each fork does one thing from the fork frame on."""

from __future__ import annotations

import dataclasses
import shutil
import sys
from typing import Any

import numpy as np
import torch
from rich.console import Console

from model.data import frames_to_uint8
from model.sampler import FrameSampler
from ringkv import StepRunner
from ringkv.harness.machine import machine_card
from ringkv.harness.records import RunDir
from ringkv.harness.video import Pixels, side_by_side, write_gif
from scripts.app import build
from scripts.app.forks_check import Forks
from scripts.app.geometry import model_config
from scripts.app.strategies import kv_config

GIF_FILE = "forks.gif"
ORIGINAL = "as recorded"
OK, REFUSED = 0, 2


def run_forks(forks: Forks, run_dir: RunDir) -> int:
    """Roll out, fork, and write the GIF and what it shows; the exit code."""
    config, console = forks.config, Console(soft_wrap=True, highlight=False)
    with run_dir:
        run_dir.write_config(config)
        try:
            runner, request, fps, weights = _set_up(forks)
        except ValueError as error:
            run_dir.write_summary({}, error=error)
            print(f"error: {error}", file=sys.stderr)
            return REFUSED
        panels = roll_out(forks, runner, request)
        path = run_dir.path / GIF_FILE
        write_gif(path, side_by_side(panels, config.context_frames), fps)
        if config.out is not None:
            shutil.copyfile(path, config.out)
        run_dir.write_summary(
            {
                "machine": machine_card(config.device, packages=("ringkv", "model", "scripts")),
                "model/weights": weights,
                "fork/frame": config.fork_frame,
                "fork/mean_difference": difference_by_frame(panels),
            }
        )
    console.print(f"weights {weights}", markup=False)
    console.print(f"forked  at frame {config.fork_frame} of {config.num_frames}: {', '.join(panels)}", markup=False)
    console.print(f"gif     {config.out or path}", markup=False)
    return OK


def roll_out(forks: Forks, runner: StepRunner, request: build.RolloutRequest) -> dict[str, Pixels]:
    """Every frame of the original and of each fork, uint8 [N, H, W, C], by name; what is shared stands in each.

    Raises what failed one of them.
    """
    shown: dict[str, list[np.ndarray]] = {request.rid: []}
    runner.submit(request)
    while len(shown[request.rid]) < (forks.config.fork_frame or 0):
        _collect(runner, shown)
    actions = []
    for code in forks.codes.values():
        actions.append(request.actions.clone())
        actions[-1][forks.config.fork_frame :] = code
    runner.fork(request.rid, list(forks.codes), actions)
    for name in forks.codes:
        shown[name] = list(shown[request.rid])
    while runner.pending:
        _collect(runner, shown)
    return {name: np.stack(frames) for name, frames in shown.items()}


def difference_by_frame(panels: dict[str, Pixels]) -> dict[str, list[float]]:
    """Mean absolute difference of each fork's frames from the original's, in 8-bit steps; 0 before the fork."""
    first = panels[ORIGINAL].astype(float)
    return {
        name: np.abs(frames - first).mean(axis=(1, 2, 3)).tolist()
        for name, frames in panels.items()
        if name != ORIGINAL
    }


def _collect(runner: StepRunner, shown: dict[str, list[np.ndarray]]) -> None:
    results = runner.step()
    for error in runner.failed.values():
        raise error
    for result, image in zip(results, frames_to_uint8(torch.stack([r.image for r in results])), strict=True):
        shown[result.rid].append(image)


def _set_up(forks: Forks) -> tuple[StepRunner, build.RolloutRequest, float, str]:
    """Runner, the original's request, frames per second, and where the weights are from."""
    config, rollout = forks.config, forks.rollout
    assert config.threads is not None
    assert config.num_frames is not None
    torch.set_num_threads(config.threads)
    geometry = model_config(rollout)
    (clip,) = build.load_clips(config, geometry)
    weights = build.build_weights(rollout, geometry)
    runner: Any = build.build_runner(
        config.kv.strategy, kv_config(rollout, geometry), build.resource_info(rollout), FrameSampler(weights.model)
    )
    (request,) = build.rollout_requests(config, [clip], config.num_frames)
    source = "random" if weights.path is None else str(weights.path)
    return runner, dataclasses.replace(request, rid=ORIGINAL), clip.fps, source
