"""The Weights & Biases run of a job that has one folder and one run in it."""

from __future__ import annotations

from ringkv.harness.records import RunDir
from ringkv.harness.tracking import Tracker, start_tracker
from scripts.app.schema import JobKnobs, TrainConfig


def open_tracker(config: JobKnobs | TrainConfig, run_dir: RunDir) -> Tracker:
    """Start it under the name of the folder, as ``config.tracking`` says; the caller finishes it."""
    tracking = config.tracking
    return start_tracker(
        tracking.mode,
        project=tracking.project,
        group=tracking.group,
        name=run_dir.path.name,
        config=config,
        directory=run_dir.path,
    )
