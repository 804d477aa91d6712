"""Roll a frame transformer out on a ring KV cache, and measure it.

    python scripts/rollout.py ring_frames=32
    python scripts/rollout.py -m ring_frames=8,16,32
    python scripts/rollout.py rollout.resume=outputs/2026-01-31/12-00-00-000000

The knobs are in conf/rollout.yaml and scripts/app/schema.py; ``--help`` prints them.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ringkv.harness.records import RunDir
    from scripts.app.schema import RolloutConfig


def main(argv: Sequence[str]) -> int:
    """Run with the command line ``argv`` (without the program's name).

    Returns the exit code: 0 done, 1 a run failed (its summary.json says why), 2 bad input (one line on stderr).
    """
    from scripts.app.check import effective
    from scripts.app.cli import Job, run

    return run(Job("rollout", effective, _rollout, sweeps=True, resumes=True), argv)


def _rollout(config: RolloutConfig, run_dir: RunDir) -> int:
    from scripts.app.job import run_rollout

    return run_rollout(config, run_dir, name=run_dir.path.name, group=config.tracking.group)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
