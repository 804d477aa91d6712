"""Compare ways of keeping the past: same weights, noise, actions and frames, in one process.

    python scripts/compare.py ring_frames=16 num_frames=256

The knobs are in conf/compare.yaml and scripts/app/schema.py; ``--help`` prints them.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ringkv.harness.records import RunDir
    from scripts.app.compare_check import Comparison


def main(argv: Sequence[str]) -> int:
    """Run with the command line ``argv`` (without the program's name).

    Returns the exit code: 0 done, also when a strategy ran out of its budget; 1 something failed (compare.json says
    what); 2 bad input (one line on stderr).
    """
    from scripts.app.cli import Job, run
    from scripts.app.compare_check import checked

    return run(Job("compare", checked, _compare), argv)


def _compare(comparison: Comparison, run_dir: RunDir) -> int:
    from scripts.app.compare import run_comparison

    return run_comparison(comparison, run_dir)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
