"""Calculate what fits a device and what it takes, for every way of keeping the past; nothing is run.

    python scripts/plan.py model=waypoint_720p budget_gib=80

The knobs are in conf/plan.yaml and scripts/app/schema.py; ``--help`` prints them.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence


def main(argv: Sequence[str]) -> int:
    """Run with the command line ``argv`` (without the program's name).

    Returns the exit code: 0 done, 2 bad input (one line on stderr).
    """
    from scripts.app.cli import Job, run
    from scripts.app.plan import checked
    from scripts.app.plan_report import run_plan

    return run(Job("plan", checked, run_plan), argv)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
