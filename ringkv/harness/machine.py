"""What a run ran on, so that its numbers can be compared or explained."""

from __future__ import annotations

import hashlib
import importlib.metadata
import importlib.util
import os
import platform
import subprocess
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil

if TYPE_CHECKING:  # only the card needs it, and imports it: a hash is wanted where torch takes longer than the job
    import torch


def machine_card(device: str | torch.device, *, packages: Sequence[str] = ("ringkv",)) -> dict[str, Any]:
    """What the process runs on, as plain values; None for what this machine does not tell.

    device: the torch device of the run. packages: importable packages whose files ``source_hash`` covers; the commit
    is that of the checkout that tracks the first of them. Call it after ``torch.set_num_threads``.
    """
    import torch

    device = torch.device(device)
    directories = [_package_directory(name) for name in packages]
    return {
        "cpu": _cpu_model(),
        "cores_physical": psutil.cpu_count(logical=False),
        "cores_logical": psutil.cpu_count(logical=True),
        "cores_usable": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else None,
        "ram_bytes": psutil.virtual_memory().total,
        "platform": platform.platform(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "ringkv": _version("ringkv"),
        "threads": torch.get_num_threads(),
        "device": str(device),
        "device_name": torch.cuda.get_device_name(device) if device.type == "cuda" else _cpu_model(),
        "git_commit": git_commit(directories[0]),
        "source_hash": source_hash(directories),
    }


def package_hash(packages: Sequence[str]) -> str:
    """``source_hash`` of importable packages, as a machine card of them has it."""
    return source_hash(map(_package_directory, packages))


def source_hash(paths: Iterable[str | os.PathLike[str]]) -> str:
    """sha256 (hex) of the ``.py`` files below each directory: their relative names and bytes, not their times.

    The same files give the same hash wherever the directories lie; their order counts. ``ValueError`` for a path
    that is not a directory.
    """
    digest = hashlib.sha256()
    for directory in map(Path, paths):
        if not directory.is_dir():
            raise ValueError(f"source_hash path {directory}: expected a directory")
        files = {file.relative_to(directory).as_posix(): file for file in directory.rglob("*.py")}
        for name in sorted(files):
            content = files[name].read_bytes()
            digest.update(f"{directory.name}/{name}\0{len(content)}\0".encode() + content)
    return digest.hexdigest()


def git_commit(directory: Path) -> str | None:
    """The commit checked out where ``directory`` is tracked by git, else None.

    A package installed into an environment that lies inside some other checkout is not tracked by it: None.
    """
    for arguments in (("ls-files", "--error-unmatch", "."), ("rev-parse", "HEAD")):
        try:
            result = subprocess.run(
                ["git", "-C", str(directory), *arguments], capture_output=True, text=True, timeout=10, check=True
            )
        except (OSError, subprocess.SubprocessError):
            return None
    return result.stdout.strip()


def _package_directory(name: str) -> Path:
    spec = importlib.util.find_spec(name)
    if spec is None or not spec.submodule_search_locations:
        raise ValueError(f"package {name!r}: expected an importable package")
    return Path(next(iter(spec.submodule_search_locations)))


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _cpu_model() -> str | None:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    except OSError:
        pass
    return platform.processor() or None
