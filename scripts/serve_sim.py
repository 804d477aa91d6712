"""Simulate serving: arrivals, policies and pool sizes, with the real runner and pool under a virtual clock.

    python scripts/serve_sim.py

The knobs are in conf/serve_sim.yaml and scripts/app/schema.py; ``--help`` prints them.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ringkv.harness.records import RunDir
    from scripts.app.serve.check import Serving


def main(argv: Sequence[str]) -> int:
    """Run with the command line ``argv`` (without the program's name).

    Returns the exit code: 0 done, 2 bad input (one line on stderr).
    """
    from scripts.app.cli import Job, run
    from scripts.app.serve.check import checked

    return run(Job("serve_sim", checked, _simulate), argv)


def _simulate(serving: Serving, run_dir: RunDir) -> int:
    from scripts.app.serve.report import run_simulations

    return run_simulations(serving, run_dir)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
