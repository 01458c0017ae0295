"""`python -m contenders ENTRY`: one contender, which speaks on stdin and stdout (`entry.py`)."""

import importlib
import json
import os
import sys
import traceback

import torch

from contenders.entry import Entry, Pace
from flowdup.provenance import provenance

OURS = ("contenders", "flowdup")


def main() -> None:
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries print
    entry = Entry.from_json(sys.argv[1])
    torch.set_num_threads(entry.threads)
    about = provenance(torch.device(entry.device))
    try:
        contender = importlib.import_module(f"contenders.{entry.module}")
    except ModuleNotFoundError as error:
        if not error.name or error.name.split(".")[0] in OURS:
            raise
        print(json.dumps({"absent": str(error)} | about), file=replies, flush=True)
        return
    try:
        contender.run(entry, Pace(entry, replies, about))
    except Exception as error:
        reason = f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
        traceback.print_exc()
        print(json.dumps({"failed": reason} | about), file=replies, flush=True)


if __name__ == "__main__":
    main()
