"""Run folders with chosen numbers, written the way a rollout writes them, and a reader of the page."""

from __future__ import annotations

import json
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

from ringkv.harness.columns import FRAME_COLUMNS, RECORD_VERSION, VERSION_KEY
from ringkv.harness.records import dumps_strict, to_plain
from scripts.app.schema import DataKnobs, KVKnobs, ModelKnobs, RolloutConfig, TrackingKnobs

FRAMES, CONTEXT = 8, 2
MACHINE = {"cpu": "a CPU", "device_name": "a CPU", "cores_usable": 2, "ram_bytes": 2**34, "threads": 2}
MACHINE |= {"torch": "2.13.0", "python": "3.11.7", "platform": "Linux", "git_commit": "c" * 40, "source_hash": "5" * 64}
VOID = {"meta", "img", "input", "br", "link"}


def make_run(
    folder: Path,
    *,
    strategy: str = "ring",
    ring_frames: int = 4,
    sessions: int = 1,
    seed: int = 0,
    speed: float | None = 10.0,
    kv_bytes: int | None = 2**20,
    psnr: float | None = None,
    path: str | None = None,
    weights: str = "random",
    error: str | None = None,
    machine: dict[str, Any] | None = MACHINE,
) -> Path:
    """Write one run. Latency of frame f is ``1000 / speed + f`` ms, its PSNR ``psnr - f``."""
    config = RolloutConfig(
        ring_frames=ring_frames,
        ring_buckets=ring_frames,
        num_sessions=sessions,
        num_frames=FRAMES,
        context_frames=CONTEXT,
        seed=seed,
        threads=2,
        model=ModelKnobs(preset="tiny"),
        data=DataKnobs(name="video" if path else "synthetic", path=path),
        tracking=TrackingKnobs(mode="disabled"),
        kv=KVKnobs(strategy=strategy),
    )
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(dumps_strict({**to_plain(config), VERSION_KEY: RECORD_VERSION}))
    rows = [] if error else [_frame(frame, sessions, speed, kv_bytes, psnr) for frame in range(FRAMES)]
    (folder / "frames.jsonl").write_text("".join(dumps_strict(row) + "\n" for row in rows))
    summary: dict[str, Any] = {
        VERSION_KEY: RECORD_VERSION,
        "status": "failed" if error else "ok",
        "error": error,
        "traceback": None,
        "memory/kv_bytes_predicted": kv_bytes,
    }
    if machine is not None:
        summary["machine"] = machine
    if not error:
        summary |= {
            "throughput/frames_per_s": speed,
            "latency/frame_ms_p50": None if speed is None else 1000 / speed,
            "memory/kv_bytes": kv_bytes,
            "memory/kv_in_use_bytes": kv_bytes,
            "memory/peak_rss_bytes": 2**28,
            "quality/psnr_db": psnr,
            "model/weights": weights,
            "ring/frames": [ring_frames, ring_frames] if strategy == "ring" else [],
            "ring/dilation": [1, 2] if strategy == "ring" else [],
        }
    (folder / "summary.json").write_text(dumps_strict(summary))
    return folder


def _frame(frame: int, sessions: int, speed: float | None, kv_bytes: int | None, psnr: float | None) -> dict[str, Any]:
    context = frame < CONTEXT
    row: dict[str, Any] = {
        "step": frame,
        "phase": "context" if context else "generated",
        "clocks": [frame] * sessions,
        "frames": [[f"session-{index}", frame] for index in range(sessions)],
        "sessions": sessions,
        "latency_ms": None if speed is None else 1000 / speed + frame,
        "warmup": frame == CONTEXT,
        "kv_bytes": kv_bytes,
        "kv_in_use_bytes": kv_bytes,
        "rss_bytes": 2**28,
        "checksums": ["0" * 8] * sessions,
        "psnr_db": [None if context or psnr is None else psnr - frame] * sessions,
    }
    return {name: row[name] for name in FRAME_COLUMNS}


class PageReader(HTMLParser):
    """What the page is made of. Raises where a tag closes another than the one that is open."""

    def __init__(self, text: str) -> None:
        super().__init__(convert_charrefs=True)
        self.open: list[str] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.sections: list[str] = []
        self.words: list[str] = []
        self.data: dict[str, Any] = {}
        self._script: dict[str, str | None] = {}
        self.feed(text)
        self.close()
        assert self.open == [], f"never closed: {self.open}"

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = dict(attrs)
        self.tags.append((tag, values))
        if tag == "section":
            self.sections.append(str(values["id"]))
        if tag == "script":
            self._script = values
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        inside = self.open[-1] if self.open else ""
        if inside == "script":
            if self._script.get("id") == "data":
                self.data = json.loads(data, parse_constant=_refuse)
        elif inside != "style" and data.strip():
            self.words.append(data)

    @property
    def figures(self) -> dict[str, dict[str, Any]]:
        """Data of the figures by name."""
        return {figure["name"]: figure for figure in self.data["figures"]}


def _refuse(constant: str) -> None:
    raise AssertionError(f"{constant} in the page")
