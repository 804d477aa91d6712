"""Join any number of runs into one Parquet file, and print them as a table.

    python scripts/collect.py outputs/2026-01-31 multirun/2026-01-31 --out runs.parquet

Every rollout in these folders and below is a row: its knobs, what it measured, why it failed if it did, and the command
that makes it again. Columns and units are in docs/records.md.
"""

from __future__ import annotations

import argparse
import importlib.util
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn


def main(argv: Sequence[str]) -> int:
    """Run with the command line ``argv`` (without the program's name).

    Returns the exit code: 0 done, 2 bad input (one line on stderr).
    """
    from scripts.app.errors import BadInput

    class Parser(argparse.ArgumentParser):
        def error(self, message: str) -> NoReturn:
            raise BadInput(message)

    description, _, epilog = (__doc__ or "").partition("\n\n")
    parser = Parser("collect.py", description=description, epilog=epilog, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("dirs", nargs="+", metavar="DIR", help="folder of a run or of a sweep, or one above them")
    parser.add_argument("--out", type=Path, default=Path("runs.parquet"), help="the file to write: runs.parquet")
    parser.add_argument("--overwrite", action="store_true", help="replace that file if it is there")
    if set(argv) & {"-h", "--help"}:
        parser.print_help()
        return 0
    try:
        arguments = parser.parse_args(list(argv))
        _collect(arguments.dirs, arguments.out, overwrite=arguments.overwrite)
    except BadInput as refusal:
        print(f"error: {refusal}", file=sys.stderr)
        return 2
    return 0


def _collect(dirs: Sequence[str], out: Path, *, overwrite: bool) -> None:
    from rich.console import Console

    from scripts.app.collect import collect
    from scripts.app.collect_report import print_rows, write_parquet
    from scripts.app.errors import BadInput

    if importlib.util.find_spec("pyarrow") is None:
        raise BadInput("pyarrow is not installed; expected pip install 'ringkv[report]'")
    if out.is_dir() or not out.absolute().parent.is_dir():
        raise BadInput(f"--out {out}: expected a file in a folder that exists")
    if out.exists() and not overwrite:
        raise BadInput(f"--out {out}: is there already; expected another path, or --overwrite")
    rows = collect(dirs, in_each=True)
    write_parquet(rows, out)
    console = Console(soft_wrap=True, highlight=False)
    print_rows(rows, console)
    console.print(f"rows    {out}", markup=False)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
