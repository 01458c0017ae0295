"""`scripts/lease.sh`: a queue of tables on a machine that one has for some minutes."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
TABLE = """
title = "A table"
preset = "digits"
seeds = [0, 1]
settings = { server = { rounds = 2 }, run = { evaluate_every = 1 } }
[columns]
few = { data = { labeled_fraction = 0.1 } }
[rows."FedAvg + EM"]
settings = { method = { name = "fedavg", correction = "em" } }
"""
QUEUE = """\
--jobs 1 --seeds 1 "small-table/FedAvg + EM"

# what is not there
no-such-table
--jobs 1 small-table"""


def test_a_queue_is_worked_through_and_its_records_come_back(tmp_path: Path) -> None:
    here, lease, out = (tmp_path / name for name in ("here", "lease", "out"))
    for folder in ("src", "experiments", "scripts"):
        shutil.copytree(ROOT / folder, here / folder, ignore=shutil.ignore_patterns("__pycache__"))
    for path in (here / "results", here / "carry", out):
        path.mkdir()
    (here / "results/runs.jsonl").touch()
    (here / "experiments/small-table.toml").write_text(TABLE)
    (here / "carry/piece").write_text("data")
    (here / "carry/queue").write_text(QUEUE)
    environment = os.environ | {
        **{"LEASE": str(lease), "OUT": str(out), "DEVICE": "cpu", "PRECISION": "tf32"},
        **{
            "FLOWDUP_COMMIT": "abc1234",
            "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        },
    }

    def call(*arguments: str) -> str:
        command = ["scripts/lease.sh", *arguments]
        done = subprocess.run(
            command, cwd=here, env=environment, capture_output=True, text=True, check=True
        )
        return done.stdout

    (here / "carry/unpack").write_text("exit 3\n")
    call("begin", "600", "carry/queue")
    assert call("watch", "60") == "== the queue has ended\n"  # and does not wait any longer
    (here / "carry/unpack").write_text('cp piece "$FLOWDUP_DATA/whole"\n')
    call("begin", "600", "carry/queue")
    shutil.rmtree(here / "carry")  # as where the next call brings another tree
    told = call("watch", "300")
    assert (lease / "data/whole").read_text() == "data"
    assert "there is no table 'no-such-table'" in told  # and the next line is worked on
    assert told.count("seconds for:") == 3
    assert told.rstrip().endswith("== the queue has ended")
    records = [json.loads(line) for line in (out / "records.jsonl").read_text().splitlines()]
    assert sorted(record["settings"]["seed"] for record in records) == [0, 1]
    assert all(record["commit"] == "abc1234" and "test" in record for record in records)
