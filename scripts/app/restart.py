"""Where a run starts: at frame 0, or where an earlier process left it; and what must be the same as it was then.

A resumed run goes on from its last snapshot, or from frame 0 where it has none (``snapshot_every=0``, too few frames,
recomputation, which keeps no state). Frames that it logged before are made again and must have the same checksums.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from ringkv.harness.columns import RECORD_VERSION
from ringkv.harness.meters import FrameMeter
from ringkv.harness.records import SNAPSHOT_FOLDER, RunDir, read_config, read_frames, read_segments, to_plain
from scripts.app.flat import flat
from scripts.app.rollout import Rollout
from scripts.app.schema import RolloutConfig
from scripts.app.snapshots import Snapshot, read_snapshot

_MAY_DIFFER = ("sweep", "tracking", "rollout", "snapshot_every", "profile", "target_fps", "data.folder")
"""Knobs, and groups of them, that change nothing of the frames."""


class FrameDiffers(RuntimeError):
    """A frame that was logged before came out otherwise."""


@dataclass(frozen=True)
class Restart:
    """rows: those of frames.jsonl so far. snapshot: what the run goes on from. segments: what segments.json holds."""

    rows: Sequence[Mapping[str, Any]] = ()
    snapshot: Snapshot | None = None
    segments: Sequence[Mapping[str, Any]] = ()

    @property
    def from_step(self) -> int:
        """The first step to make."""
        return 0 if self.snapshot is None else self.snapshot.step

    @property
    def nothing_generated(self) -> bool:
        """Whether every row so far is of context."""
        return all(row["phase"] == "context" for row in self.rows)

    def hand_over(self, rollout: Rollout, meter: FrameMeter) -> None:
        """Give rows, pixels and times of the steps so far to ``rollout`` and ``meter``."""
        rollout.rows.extend(dict(row) for row in self.rows)
        for rid, shown in ({} if self.snapshot is None else self.snapshot.frames).items():
            rollout.frames[rid].extend(shown)
        meter.restore(
            (
                (row["latency_ms"], len(row["frames"]) * (row["phase"] == "generated"), row["warmup"])
                for row in self.rows
            ),
            None if self.snapshot is None else self.snapshot.first_frame_ms,
        )

    def compare(self, row: Mapping[str, Any]) -> None:
        """Hold a step that was made again against its row. ``FrameDiffers`` names the first frame that is another."""
        logged = self.rows[row["step"]]
        made = zip(row["frames"], row["checksums"], logged["checksums"], strict=True)
        for (rid, frame), checksum, expected in made:
            if checksum != expected:
                raise FrameDiffers(
                    f"step {row['step']}: frame {frame} of {rid} has checksum {checksum}, and had {expected} when it "
                    "was logged; something that the frames depend on has changed, so the run cannot go on"
                )


def look_up(run_dir: RunDir, config: RolloutConfig, rollout: Rollout) -> Restart:
    """Where the run in ``run_dir`` starts. ``ValueError`` with one line if what it depends on is not as it was."""
    if not run_dir.resumes:
        return Restart()
    rows, segments = read_frames(run_dir.path).rows, read_segments(run_dir.path)
    where = f"run directory {run_dir.path}"
    recorded, now = dict(flat(read_config(run_dir.path))), dict(flat(to_plain(config)))
    for key in sorted(recorded.keys() | now.keys()):
        if recorded.get(key) != now.get(key) and not _may_differ(key):
            raise ValueError(f"{where}: has {key}={recorded.get(key)}, this run {key}={now.get(key)}")
    if segments:
        for name, found in (("weights", rollout.runner.model.fingerprint), ("data_hashes", _hashes(rollout))):
            if segments[0][name] != found:
                what = "weights" if name == "weights" else "recorded frames"
                raise ValueError(f"{where}: began with other {what} ({segments[0][name]}, now {found})")
    names = list(rollout.frames)
    for step, row in enumerate(rows):
        rids = [rid for rid, _ in row["frames"]]
        if row["step"] != step or rids != names:
            raise ValueError(
                f"{where}: row {step} of frames.jsonl is of step {row['step']} with {', '.join(rids)}; a run goes on "
                f"only as long as none of its requests ({', '.join(names)}) failed and left the others"
            )
    return Restart(rows, read_snapshot(run_dir.path / SNAPSHOT_FOLDER, rows), segments)


def new_segment(
    restart: Restart, rollout: Rollout, machine: Mapping[str, Any], *, group: str, name: str, wandb_id: str | None
) -> dict[str, Any]:
    """The entry of segments.json of the segment that begins."""
    return {
        "segment": len(restart.segments),
        "started_at": datetime.now(UTC).isoformat(timespec="seconds"),
        "from_step": restart.from_step,
        "first_step": len(restart.rows),
        "record_version": RECORD_VERSION,
        "weights": rollout.runner.model.fingerprint,
        "data_hashes": _hashes(rollout),
        "source_hash": machine["source_hash"],
        "git_commit": machine["git_commit"],
        "group": group,
        "name": name,
        "wandb_id": wandb_id,
    }


def _may_differ(key: str) -> bool:
    return any(key == name or key.startswith(f"{name}.") for name in _MAY_DIFFER)


def _hashes(rollout: Rollout) -> list[str]:
    return [clip.content_hash for clip in rollout.clips]
