"""Benchmark: read path, frame and rollout against what the machine can do, from one process.

    python scripts/bench.py
    python scripts/bench.py levels=[reads] grid.tokens=[16] budget_s=60

The knobs are in conf/bench.yaml and scripts/app/schema.py; ``--help`` prints them.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ringkv.harness.records import RunDir
    from scripts.app.bench.check import Bench


def main(argv: Sequence[str]) -> int:
    """Run with the command line ``argv`` (without the program's name).

    Returns the exit code: 0 done, whatever the targets say; 1 something failed (bench.json says what); 2 bad input (one
    line on stderr).
    """
    from scripts.app.bench.check import checked
    from scripts.app.cli import Job, run

    return run(Job("bench", checked, _bench), argv)


def _bench(bench: Bench, run_dir: RunDir) -> int:
    from scripts.app.bench.job import run_bench

    return run_bench(bench, run_dir)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
