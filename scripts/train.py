"""Train a model: the ones that ship, or another by the same means.

    python scripts/train.py recipe=freeway

The knobs are in conf/train.yaml, scripts/app/schema.py and model/training/recipe.py; ``--help`` prints them.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ringkv.harness.records import RunDir
    from scripts.app.schema import TrainConfig


def main(argv: Sequence[str]) -> int:
    """Run with the command line ``argv`` (without the program's name).

    Returns the exit code: 0 done, 1 the run failed (its summary.json says why), 2 bad input (one line on stderr).
    """
    from scripts.app.cli import Job, run
    from scripts.app.train_check import checked

    return run(Job("train", checked, _train), argv)


def _train(config: TrainConfig, run_dir: RunDir) -> int:
    from scripts.app.train import run_training

    return run_training(config, run_dir)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
