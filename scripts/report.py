"""Report runs, sweeps, comparisons, horizon maps and probes on one page that opens without a network.

    python scripts/report.py outputs/2026-11-29 [DIR ...] [out=DIR] [tracking=offline|online|disabled]

Everything below the folders is found. Written: report.html, and a PNG and a CSV of each figure beside it; the same
goes to Weights & Biases. out: by default ``report`` in the first folder.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence


def main(argv: Sequence[str]) -> int:
    """Run with the command line ``argv`` (without the program's name).

    Returns the exit code: 0 done, 2 bad input (one line on stderr).
    """
    from scripts.app.errors import BadInput
    from scripts.app.html.report import make_report, read_request

    if set(argv) & {"-h", "--help"}:
        print(__doc__)
        return 0
    try:
        make_report(read_request(argv))
    except BadInput as refusal:
        print(f"error: {refusal}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
