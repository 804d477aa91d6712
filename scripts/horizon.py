"""Print and draw which frame ages each layer of a model sees.

    python scripts/horizon.py model=waypoint_720p frame=1000

The knobs are in conf/horizon.yaml and scripts/app/horizon.py.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence


def main(argv: Sequence[str]) -> int:
    """Run with the command line ``argv`` (without the program's name).

    Returns the exit code: 0 done, 2 bad input (one line on stderr).
    """
    from scripts.app.errors import BadInput
    from scripts.app.horizon import KNOBS, draw

    if set(argv) & {"-h", "--help"}:
        print(f"{__doc__}\nKeys: {', '.join(KNOBS)}")
        return 0
    try:
        draw(argv)
    except BadInput as refusal:
        print(f"error: {refusal}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
