"""State files that were damaged, cut short, made by others or by a later release: refused with the reason."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from ringkv import AttentionResource
from ringkv.statefile import read_state, write_state
from tests.ring_tools import ring, same_bytes
from tests.strategies import STRATEGIES, Rollout, kv_tensors

every_strategy = pytest.mark.parametrize("name", STRATEGIES)


def saved(name: str, path: Path, **changes: Any) -> Rollout:
    rollout = Rollout(name, [ring(2), ring(1, 2)], tokens=1, head_dim=2, **changes)
    rollout.content = lambda rid, frame, *_: (torch.ones(1, 1, 2) * frame,) * 3  # type: ignore[assignment]
    rollout.run("a", range(5))
    rollout.resource.save("a", path)
    return rollout


def refused(resource: AttentionResource, path: Path, reason: str = "") -> None:
    """Loading ``path`` raises one line that names it, and changes nothing."""
    held, state = [t.clone() for t in kv_tensors(resource)], resource.get_state("a")
    with pytest.raises(ValueError, match=reason) as refusal:
        resource.load("a", path)
    assert str(path) in str(refusal.value)
    assert "\n" not in str(refusal.value)
    assert same_bytes([held, state], [kv_tensors(resource), resource.get_state("a")])


@pytest.mark.parametrize("undo_frames", [0, 2])
def test_a_file_with_any_one_bit_flipped_is_refused(undo_frames: int, tmp_path: Path) -> None:
    path = tmp_path / "a.state"
    rollout = saved("ring", path, undo_frames=undo_frames)
    good = path.read_bytes()
    for place in range(0, len(good), 5 if undo_frames else 1):
        path.write_bytes(good[:place] + bytes([good[place] ^ 1 << place % 8]) + good[place + 1 :])
        with pytest.raises(ValueError, match=path.name):
            read_state(path)
    path.write_bytes(good[:-1] + bytes([good[-1] ^ 1]))
    refused(rollout.resource, path, "does not match its checksum")
    path.write_bytes(good)
    rollout.resource.load("a", path)


@every_strategy
def test_a_file_cut_short_or_with_something_after_it_is_refused(name: str, tmp_path: Path) -> None:
    path = tmp_path / "a.state"
    rollout = saved(name, path)
    good = path.read_bytes()
    for content in (b"", good[:4], good[:9], good[: len(good) // 2], good[:-1], good + b"\0", good + good):
        path.write_bytes(content)
        refused(rollout.resource, path, "not a readable safetensors file")
    path.write_bytes(good)
    rollout.resource.load("a", path)


def resealed(path: Path, change: dict[str, Any]) -> None:
    """Rewrite the state in ``path`` with fields changed and a checksum that is right."""
    state, extra = read_state(path)
    write_state(path, {**state, **change}, extra)


def test_a_file_of_a_later_version_is_refused_as_such(tmp_path: Path) -> None:
    path = tmp_path / "a.state"
    rollout = saved("ring", path)
    resealed(path, {"version": 2})
    refused(rollout.resource, path, "version=2, this release reads version 1")
    # Whatever a later release keeps in it and however it names that.
    save_file({"pages": torch.zeros(3)}, path, metadata={"ringkv": json.dumps({"version": 3, "format": "new"})})
    refused(rollout.resource, path, "version=3, this release reads version 1")


@pytest.mark.parametrize(
    ("metadata", "reason"),
    [
        (None, "not one that a cache saved"),
        ({}, "not one that a cache saved"),
        ({"ringkv": "not json"}, "not one that a cache saved"),
        ({"ringkv": "[]"}, "not one that a cache saved"),
        ({"ringkv": json.dumps({"version": 1})}, "does not match its checksum"),
        ({"ringkv": json.dumps({"version": 1}), "checksum": "0" * 64}, "does not match its checksum"),
    ],
)
def test_a_safetensors_file_that_no_cache_wrote_is_refused(
    metadata: dict[str, str] | None, reason: str, tmp_path: Path
) -> None:
    path = tmp_path / "a.state"
    rollout = saved("ring", path)
    save_file(load_file(path), path, metadata=metadata)
    refused(rollout.resource, path, reason)


@every_strategy
def test_a_file_of_another_strategy_is_whole_and_still_refused(name: str, tmp_path: Path) -> None:
    path = tmp_path / "other.state"
    rollout = saved(name, tmp_path / "a.state")
    saved("full" if name != "full" else "ring", path)
    held = rollout.resource.get_state("a")
    if name.startswith("full"):
        saved("ring", path)
    with pytest.raises(ValueError, match=r"geometry \w+="):
        rollout.resource.load("a", path)
    assert same_bytes(rollout.resource.get_state("a"), held)


def test_a_header_that_promises_more_than_there_is_takes_no_memory(tmp_path: Path) -> None:
    path = tmp_path / "a.state"
    rollout = saved("ring", path)
    for length in (2**63 - 1, 2**40, len(path.read_bytes()) + 1):
        path.write_bytes(struct.pack("<Q", length) + path.read_bytes()[8:])
        refused(rollout.resource, path, "not a readable safetensors file")


def test_what_is_stored_beside_a_state_is_under_the_checksum_too(tmp_path: Path) -> None:
    path = tmp_path / "a.state"
    state = saved("ring", path).resource.get_state("a")
    write_state(path, state, {"rollout": {"seed": 12345}})
    assert read_state(path)[1] == {"rollout": {"seed": 12345}}
    path.write_bytes(path.read_bytes().replace(b"12345", b"12346"))
    with pytest.raises(ValueError, match="does not match its checksum"):
        read_state(path)
