"""The child's side of a sweep: ``python -m scripts.app.child`` runs the one rollout that it is told on standard input.

A line of JSON, ``{"config", "run_dir", "name", "continues"}``, comes first; ``continues`` for a run that was
interrupted in that folder and goes on there. The input then stays open; its end means that the parent is gone, and this
process goes too.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
from pathlib import Path

from omegaconf import OmegaConf

from ringkv.harness.records import RunDir
from scripts.app.compose import typed
from scripts.app.schema import RolloutConfig

_GRACE_S = 5.0


def main() -> int:
    """Run the rollout; the exit code, as of scripts/rollout.py."""
    request = json.loads(sys.stdin.readline())
    threading.Thread(target=_end_with_parent, daemon=True).start()
    node = OmegaConf.structured(RolloutConfig)
    node.merge_with(request["config"])
    config = typed(node)
    claim = RunDir.reopen if request["continues"] else RunDir.create
    run_dir = claim(Path(request["run_dir"]))
    from scripts.app.job import run_rollout

    return run_rollout(config, run_dir, name=request["name"], group=config.tracking.group)


def _end_with_parent() -> None:
    # The raw descriptor: a thread that sits in sys.stdin at exit would hold the lock that the interpreter wants.
    while os.read(0, 4096):
        pass
    os.kill(os.getpid(), signal.SIGINT)  # time to record the failure
    time.sleep(_GRACE_S)
    os.killpg(os.getpgrp(), signal.SIGKILL)


if __name__ == "__main__":
    sys.exit(main())
