"""Fork one rollout and let each fork act differently; the GIF shows them side by side.

    python scripts/forks.py

The knobs are in conf/forks.yaml and scripts/app/schema.py; ``--help`` prints them.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ringkv.harness.records import RunDir
    from scripts.app.forks_check import Forks


def main(argv: Sequence[str]) -> int:
    """Run with the command line ``argv`` (without the program's name).

    Returns the exit code: 0 done, 1 the rollout failed, 2 bad input (one line on stderr).
    """
    from scripts.app.cli import Job, run
    from scripts.app.forks_check import checked

    return run(Job("forks", checked, _fork), argv)


def _fork(forks: Forks, run_dir: RunDir) -> int:
    from scripts.app.forks import run_forks

    return run_forks(forks, run_dir)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
