"""Campaigns: tables of many runs, declared in TOML files, run resumably and collected.

An experiment (`experiment.py`) is a table of cells; each has settings to choose from and seeds.
`plan` says what is missing, `run_campaign` does it, and `collect` makes the table of the records.
"""

from flowdup.campaign.cells import Experiment
from flowdup.campaign.experiment import experiment_names, load_experiment
from flowdup.campaign.records import Records
from flowdup.campaign.reproduce import Event, Request, reproduce
from flowdup.campaign.results import collect, write_results
from flowdup.campaign.schedule import plan, run_campaign

__all__ = [
    "Event",
    "Experiment",
    "Records",
    "Request",
    "collect",
    "experiment_names",
    "load_experiment",
    "plan",
    "reproduce",
    "run_campaign",
    "write_results",
]
