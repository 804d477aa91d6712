"""One training run: step, log, save, evaluate, and leave the weights and a record behind.

config.json                 every knob
curve.jsonl                 a row per step: loss, gradient norm, rate, ring_frames, frames, seconds; PSNR where taken
curve.png                   the same, drawn
state.safetensors           the training state, to go on from
checkpoint.safetensors      the averaged weights in bf16, as served
summary.json                how it ended
"""

from __future__ import annotations

import dataclasses
import json
import shlex
import shutil
import sys
import time
import traceback
from pathlib import Path
from typing import Any

import torch
from hydra.core.hydra_config import HydraConfig
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from model.checkpoint import save_checkpoint
from model.training.footage import load_footage
from model.training.recipe import Recipe
from model.training.trainer import Trainer
from ringkv.harness.machine import machine_card
from ringkv.harness.meters import PeakRss
from ringkv.harness.records import RunDir, dumps_strict
from ringkv.harness.tracking import Tracker
from scripts.app.geometry import model_config
from scripts.app.schema import TrainConfig
from scripts.app.track import open_tracker
from scripts.app.train_check import CURVE_FILE, STATE_FILE
from scripts.app.train_eval import evaluate, held_out_clips
from scripts.app.train_plot import curve_png

CHECKPOINT_FILE = "checkpoint.safetensors"
PLOT_FILE = "curve.png"
OK, FAILED, REFUSED = 0, 1, 2

_NO_SAY = ("recipe", "resume", "out", "save_every", "evaluate_every", "data.folder")
"""Keys of overrides that have no say in the weights; the recipe is named first."""


def run_training(config: TrainConfig, run_dir: RunDir) -> int:
    """Run a checked config in a claimed folder; the exit code. Whatever ends the run is recorded, Ctrl-C too."""
    console = Console(soft_wrap=True, highlight=False)
    rss, tracker, error, code = PeakRss(), None, None, OK
    facts: dict[str, Any] = {}
    with run_dir:
        try:
            run_dir.write_config(config)
            tracker = open_tracker(config, run_dir)
            facts["machine"] = machine_card("cpu", packages=("ringkv", "model", "scripts"))
            try:
                run = TrainingRun(config, run_dir.path, tracker, console)
            except ValueError:
                code = REFUSED
                raise
            facts |= run.facts()
            run.drive()
            facts |= run.results()
        except BaseException as raised:  # Ctrl-C too: whatever ends the run is on record
            error, code = raised, code or FAILED
        facts["memory/peak_rss_bytes"] = rss.peak_bytes()
        run_dir.write_summary(facts, error=error)
    sync_line = None
    if tracker is not None:
        tracker.summary(facts)
        if (run_dir.path / PLOT_FILE).is_file():
            tracker.media(image=run_dir.path / PLOT_FILE)
        sync_line = tracker.finish(0 if error is None else 1)
    if error is not None:
        if code == REFUSED:
            print(f"error: {error}", file=sys.stderr)
        else:
            traceback.print_exception(error)
            print(f"failed: {run_dir.path}", file=sys.stderr)
        return code
    names = (("weights", CHECKPOINT_FILE), ("curve", PLOT_FILE), ("state", STATE_FILE))
    for label, place in (*((label, run_dir.path / name) for label, name in names), ("upload", sync_line)):
        if place is not None:
            console.print(f"{label:<8}{place}", markup=False)
    return OK


class TrainingRun:
    """A trainer with its record. ``ValueError`` where data, state or recipe turn out unfit."""

    def __init__(self, config: TrainConfig, folder: Path, tracker: Tracker, console: Console) -> None:
        assert config.threads is not None
        torch.set_num_threads(config.threads)
        geometry = model_config(config)
        self.config, self.folder, self.tracker, self.console = config, folder, tracker, console
        source = load_footage(
            config.data.name,
            clips=config.clips,
            clip_frames=config.clip_frames,
            channels=geometry.channels,
            height=geometry.height,
            width=geometry.width,
            seed=config.seed,
            folder=config.data.folder,
        )
        knobs = {field.name: getattr(config, field.name) for field in dataclasses.fields(Recipe)}
        self.trainer = Trainer(Recipe(**knobs), geometry, source)
        self.rows: list[dict[str, Any]] = []
        if config.resume is not None:
            self.trainer.load(Path(config.resume) / STATE_FILE)
            self.rows = _rows_before(Path(config.resume) / CURVE_FILE, self.trainer.step)
            (folder / CURVE_FILE).write_text("".join(dumps_strict(row) + "\n" for row in self.rows))
        self.clips = held_out_clips(config)
        self.stop = config.steps if config.stop is None else config.stop

    def facts(self) -> dict[str, Any]:
        """What is known before the first step."""
        return {
            "model/parameters": self.trainer.model.config.num_parameters,
            "data/hash": self.trainer.source.data_hash,
            "train/resumed_at": self.trainer.step,
        }

    def results(self) -> dict[str, Any]:
        """What the run came to."""
        seconds = [row["seconds"] for row in self.rows]
        evaluated = [row for row in self.rows if any(key.startswith("psnr/") for key in row)]
        quality = {key: value for key, value in (evaluated[-1] if evaluated else {}).items() if key.startswith("psnr/")}
        return {
            "train/steps": self.trainer.step,
            "train/loss": _recent_loss(self.rows),
            "train/step_s_p50": sorted(seconds)[len(seconds) // 2] if seconds else None,
            "train/hours": sum(seconds) / 3600,
        } | quality

    def drive(self) -> None:
        """All steps that are left."""
        config, trainer = self.config, self.trainer
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
        with (
            open(self.folder / CURVE_FILE, "a", encoding="utf-8") as curve,
            Progress(*columns, console=self.console, transient=True, disable=not self.console.is_terminal) as progress,
        ):
            task = progress.add_task("steps", total=self.stop, completed=trainer.step)
            while trainer.step < self.stop:
                started = time.perf_counter()
                row: dict[str, Any] = {"step": trainer.step, **trainer.advance()}
                row["seconds"] = time.perf_counter() - started
                last = trainer.step == self.stop
                if last or (config.evaluate_every and trainer.step % config.evaluate_every == 0):
                    row |= evaluate(trainer.average, self.clips, trainer.background).metrics()
                    self._tell(row)
                self.rows.append(row)
                curve.write(dumps_strict(row) + "\n")
                curve.flush()
                self.tracker.log(row["step"], {f"train/{key}": value for key, value in row.items() if key != "step"})
                if last or (config.save_every and trainer.step % config.save_every == 0):
                    self.save()
                progress.update(task, completed=trainer.step, description=f"loss {_recent_loss(self.rows):.4f}")

    def save(self) -> None:
        """The state, the weights and the picture of the curve."""
        self.trainer.save(self.folder / STATE_FILE)
        self.write_checkpoint(self.folder / CHECKPOINT_FILE)
        curve_png(self.folder / PLOT_FILE, self.rows, self.config.recipe)
        if self.config.out is not None and self.trainer.step == self.config.steps:
            shutil.copyfile(self.folder / CHECKPOINT_FILE, self.config.out)

    def write_checkpoint(self, path: Path) -> None:
        """The averaged weights in bf16, with what they were trained on and how."""
        config, recipe = self.config, self.trainer.recipe
        weights = self.trainer.average
        save_checkpoint(
            path,
            weights,
            dtype=torch.bfloat16,
            data=config.data.name,
            data_hash=self.trainer.source.data_hash,
            recipe={"name": config.recipe, **dataclasses.asdict(recipe)},
            ring_frames=[recipe.min_ring_frames, recipe.max_ring_frames],
            dilation=[1, recipe.max_dilation if recipe.dilated_share > 0 else 1],
            context_frames=[1, max(recipe.frames, recipe.long_frames if recipe.long_share > 0 else 0)],
            steps=self.trainer.step,
            loss=_recent_loss(self.rows),
            command=command(config.recipe),
        )

    def _tell(self, row: dict[str, Any]) -> None:
        scores = "  ".join(f"{key.removeprefix('psnr/')} {row[key]:.1f}" for key in row if key.startswith("psnr/ring"))
        self.console.print(f"step {row['step'] + 1}: loss {row['loss']:.4f}  dB: {scores}", markup=False)


def command(recipe: str) -> str:
    """The line that makes these weights again: what was asked for, without what has no say in them."""
    overrides = HydraConfig.get().overrides.task
    own = [each for each in overrides if each.split("=")[0] not in _NO_SAY and not each.startswith("tracking")]
    return shlex.join(["python", "scripts/train.py", f"recipe={recipe}", *own])


def _recent_loss(rows: list[dict[str, Any]]) -> float:
    """Mean over the last 100 steps."""
    recent = [row["loss"] for row in rows[-100:]]
    return sum(recent) / len(recent)


def _rows_before(path: Path, step: int) -> list[dict[str, Any]]:
    """The rows of a curve up to the step at which its state was saved."""
    rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    return [row for row in rows if row["step"] < step]
