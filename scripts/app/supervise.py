"""One child process, watched: its time, its memory, and its end, which is this process's end too.

The child's request goes to its standard input, which then stays open as a lifeline: it closes when this process ends,
however it ends, and the child ends with it.

Memory is watched, not capped: RLIMIT_AS counts address space, of which torch reserves far more than it touches (on CUDA
hundreds of GiB), so the resident size of the child and its descendants is read several times a second.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil


@dataclass(frozen=True)
class ChildEnd:
    """How a child ended.

    killed_for: kind and line of why it was ended from here, None if it ended by itself. peak_rss_bytes: of it and its
    descendants together, as far as it was watched.
    """

    exit_code: int
    killed_for: tuple[str, str] | None
    wall_s: float
    peak_rss_bytes: int


def supervise(
    command: Sequence[str],
    request: str,
    log: Path,
    *,
    timeout_s: float,
    memory_bytes: float,
    wanted: Callable[[], bool] = lambda: True,
    grace_s: float = 5.0,
    poll_s: float = 0.1,
) -> ChildEnd:
    """Run ``command`` with the line ``request`` on its standard input and its output in ``log``, until it ends.

    After ``timeout_s`` seconds, or once nobody wants it any more, it is interrupted, as by Ctrl-C, and ``grace_s``
    seconds later killed; above ``memory_bytes`` resident it is killed at once. Its descendants go with it, also if
    this call is interrupted.
    """
    started = time.monotonic()
    peak, killed_for = 0, None
    with (
        open(log, "ab") as output,
        # A session of its own: Ctrl-C reaches the child through here only, and its descendants can be killed with it.
        subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=output, stderr=subprocess.STDOUT, start_new_session=True
        ) as child,
    ):
        assert child.stdin is not None
        try:
            with contextlib.suppress(BrokenPipeError):  # it died at once: its exit code and log say why
                child.stdin.write(request.encode() + b"\n")
                child.stdin.flush()
            while child.poll() is None:
                rss = _tree_rss_bytes(child.pid)
                peak = max(peak, rss)
                if rss > memory_bytes:
                    line = f"memory: {rss} resident bytes, above sweep.memory_gib ({memory_bytes:.0f} bytes)"
                    killed_for = ("out_of_memory", line)
                    break
                if time.monotonic() - started > timeout_s:
                    killed_for = ("timeout", f"timeout: longer than sweep.timeout_s={timeout_s:g}")
                    _end(child, grace_s)
                    break
                if not wanted():
                    killed_for = ("interrupted", "interrupted: the sweep's process is gone")
                    _end(child, grace_s)
                    break
                with contextlib.suppress(subprocess.TimeoutExpired):
                    child.wait(poll_s)
        except BaseException:
            _end(child, grace_s)
            raise
        finally:
            _kill_group(child)
            with contextlib.suppress(BrokenPipeError):
                child.stdin.close()
            child.wait()
    return ChildEnd(child.returncode, killed_for, time.monotonic() - started, peak)


def exit_text(exit_code: int) -> str:
    """An exit code in words; negative for a signal, as of ``subprocess``."""
    if exit_code >= 0:
        return f"exit code {exit_code}"
    try:
        return f"signal {signal.Signals(-exit_code).name}"
    except ValueError:
        return f"signal {-exit_code}"


def _end(child: subprocess.Popen[bytes], grace_s: float) -> None:
    """Interrupt the child and give it ``grace_s`` seconds to record that."""
    child.send_signal(signal.SIGINT)  # not to its descendants: its W&B service has to note the failure
    with contextlib.suppress(subprocess.TimeoutExpired):
        child.wait(grace_s)


def _kill_group(child: subprocess.Popen[bytes]) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(child.pid, signal.SIGKILL)


def _tree_rss_bytes(pid: int) -> int:
    """Resident bytes of a process and its descendants; pages that they share count once for each."""
    total = 0
    with contextlib.suppress(psutil.Error):
        process = psutil.Process(pid)
        for member in (process, *process.children(recursive=True)):
            with contextlib.suppress(psutil.Error):
                total += int(member.memory_info().rss)
    return total
