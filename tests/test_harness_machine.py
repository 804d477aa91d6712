"""The machine card and the hash of the sources."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from pathlib import Path

import pytest
import torch

from ringkv.harness.machine import git_commit, machine_card, source_hash


def write_package(folder: Path) -> Path:
    (folder / "sub").mkdir(parents=True)
    (folder / "a.py").write_text("a = 1\n")
    (folder / "sub" / "b.py").write_text("b = 2\n")
    (folder / "note.txt").write_text("not code\n")
    return folder


def test_the_card_is_plain_json_and_names_what_a_number_depends_on():
    card = machine_card("cpu")
    assert json.loads(json.dumps(card)) == card
    assert card["threads"] == torch.get_num_threads()
    assert card["device"] == "cpu"
    assert card["torch"] == torch.__version__
    assert card["ram_bytes"] > 1 << 28
    assert 1 <= card["cores_usable"] <= card["cores_logical"]
    assert len(card["source_hash"]) == 64


def test_the_card_refuses_a_package_that_is_not_there():
    with pytest.raises(ValueError, match="no_such_package"):
        machine_card("cpu", packages=("no_such_package",))


def test_the_source_hash_does_not_depend_on_times_or_on_where_the_files_lie(tmp_path: Path):
    package = write_package(tmp_path / "one" / "pkg")
    before = source_hash([package])
    os.utime(package / "a.py", (1, 1))
    (package / "note.txt").write_text("changed\n")
    shutil.copytree(package, tmp_path / "two" / "pkg")
    assert source_hash([package]) == before
    assert source_hash([tmp_path / "two" / "pkg"]) == before


@pytest.mark.parametrize("change", ["edit", "rename", "add", "one-file-holds-another"])
def test_the_source_hash_changes_with_the_code(tmp_path: Path, change: str):
    package = write_package(tmp_path / "pkg")
    before = source_hash([package])
    if change == "edit":
        (package / "a.py").write_text("a = 2\n")
    elif change == "rename":
        (package / "a.py").rename(package / "c.py")
    elif change == "add":
        (package / "sub" / "empty.py").write_text("")
    else:
        swallowed = package / "sub" / "b.py"
        (package / "a.py").write_bytes(b"a = 1\npkg/sub/b.py\0" + swallowed.read_bytes())
        swallowed.unlink()
    assert source_hash([package]) != before


def test_the_source_hash_refuses_a_path_that_is_no_directory(tmp_path: Path):
    with pytest.raises(ValueError, match="expected a directory"):
        source_hash([tmp_path / "absent"])


def test_the_commit_is_known_only_where_git_tracks_the_package(tmp_path: Path, monkeypatch):
    for name in [name for name in os.environ if name.startswith("GIT_")]:
        monkeypatch.delenv(name)

    def git(*arguments: str) -> str:
        identity = ("-c", "user.name=t", "-c", "user.email=t@example.org", "-c", "commit.gpgsign=false")
        command = ["git", "-C", str(tmp_path), *identity, *arguments]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()

    tracked, untracked = write_package(tmp_path / "tracked"), write_package(tmp_path / "untracked")
    git("init", "--quiet")
    git("add", "tracked")
    git("commit", "--quiet", "--no-verify", "-m", "first")
    assert git_commit(tracked) == git("rev-parse", "HEAD")
    assert git_commit(untracked) is None
    monkeypatch.setenv("PATH", "")
    assert git_commit(tracked) is None
