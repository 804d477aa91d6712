"""Ask a model, and the way it keeps its past, what they remember.

    python scripts/probe.py probe=recall
    python scripts/probe.py probe=return kv=shift
    python scripts/probe.py probe=fidelity
    python scripts/probe.py probe=drift probe.candidate_kv_dtype=bfloat16

The knobs are in conf/probe.yaml, conf/probe and scripts/app/schema.py; ``--help`` prints them.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ringkv.harness.records import RunDir
    from scripts.app.probe.check import Probe


def main(argv: Sequence[str]) -> int:
    """Run with the command line ``argv`` (without the program's name).

    Returns the exit code: 0 done, 1 the probe failed (its summary.json says why), 2 bad input (one line on stderr).
    """
    from scripts.app.cli import Job, run
    from scripts.app.probe.check import checked

    return run(Job("probe", checked, _probe), argv)


def _probe(probe: Probe, run_dir: RunDir) -> int:
    from scripts.app.probe.run import run_probe

    return run_probe(probe, run_dir)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
