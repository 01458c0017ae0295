"""Runs: a configuration made ready, trained into a folder, evaluated, drawn and compared."""

from flowdup.run.certify import certify_run
from flowdup.run.folder import ComparisonFolder, RunFolder
from flowdup.run.results import embed_run, evaluate_model, evaluate_run, write_report
from flowdup.run.simulation import Simulation
from flowdup.run.training import train_run

__all__ = [
    "ComparisonFolder",
    "RunFolder",
    "Simulation",
    "certify_run",
    "embed_run",
    "evaluate_model",
    "evaluate_run",
    "train_run",
    "write_report",
]
