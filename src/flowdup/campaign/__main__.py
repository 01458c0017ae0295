"""`python -m flowdup.campaign`: as `flowdup reproduce`, where typer and rich are not installed."""

import argparse
import sys
from pathlib import Path

from flowdup.campaign.reproduce import Request, reproduce
from flowdup.errors import FlowdupError
from flowdup.interruption import Interruption


def main() -> None:
    """The command line: read the arguments, run, and print what happens."""
    default = Request([])
    parser = argparse.ArgumentParser("python -m flowdup.campaign", description=__doc__)
    parser.add_argument("tables", nargs="+", metavar="TABLE")
    parser.add_argument("--jobs", type=int, default=default.jobs)
    parser.add_argument("--seconds", type=float, default=default.seconds)
    parser.add_argument("--seeds", type=int, default=default.seeds)
    parser.add_argument("--rows", default=default.rows)
    parser.add_argument("--columns", default=default.columns)
    parser.add_argument("--set", dest="settings", action="append", default=[])
    parser.add_argument("--work", type=Path, default=default.work)
    parser.add_argument("--records", type=Path, default=default.records)
    parser.add_argument("--merge", type=Path, action="append", default=[])
    parser.add_argument("--results", type=Path, default=default.results)
    parser.add_argument("--dry-run", action="store_true")
    parser.add_argument("--no-run", dest="run", action="store_false")
    request = Request(**vars(parser.parse_args()))
    with Interruption() as stop:
        try:
            for event in reproduce(request, stop):
                print(event.sentence, flush=True)
        except FlowdupError as error:
            print(f"error: {error}", file=sys.stderr)
            sys.exit(error.exit_code)
        if stop.signal:
            sys.exit(128 + stop.signal)


if __name__ == "__main__":
    main()
