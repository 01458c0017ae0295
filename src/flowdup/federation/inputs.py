"""What inputs look like, at a coordinator that has none: by the settings, or by what nodes tell.

Nodes tell shape, type, the number of classes or their names, names of a table's columns, and per
channel the sums of which mean and standard deviation are made; this once, before the first round of
a run.
"""

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from flowdup.config import Config
from flowdup.data.input_spec import InputSpec, check_names
from flowdup.data.sources import SOURCES
from flowdup.data.statistics import ChannelSums, combine
from flowdup.errors import ConfigError, DataError, FederationError
from flowdup.federation.calls import Calls
from flowdup.federation.folder import read_json, write_json
from flowdup.federation_spec import read_spec
from flowdup.settings import plain
from flowdup.strict_json import get_count, get_counts, get_numbers, get_text, get_texts


def find_inputs(config: Config, run: Path, calls: Calls) -> InputSpec:
    """The run's inputs, found in its first job and stored for the others."""
    path = run / "inputs.json"
    if path.is_file():
        return read_spec(read_json(path))
    source = SOURCES.get(config.data.source)
    if source is not None:
        spec = InputSpec(source.shape, "uint8", source.classes, source.mean, source.std)
    else:
        spec = _ask(config, calls)
    names = check_names(spec, config.data.class_names, config.data.source)
    table = asdict(spec) | {"class_names": list(names)}
    write_json(path, table)
    return read_spec(read_json(path))


def _ask(config: Config, calls: Calls) -> InputSpec:
    request = json.dumps(plain(config))
    answers = calls.call("describe", {node: (request,) for node in calls.alive})
    told = {n: _read(n, answer) for n, answer in answers.items()}
    if not told:
        raise FederationError("no node told what its inputs look like: see their own output")
    columns = next((table["columns"] for table in told.values() if table["columns"]), ())
    for table in told.values():
        table["columns"] = table["columns"] or columns  # files of arrays have no names for them
    (first, own), *others = told.items()
    for node, other in others:
        for key in ("shape", "dtype", "class_names", "columns"):
            if own[key] != other[key]:
                raise DataError(
                    f"inputs of {first} have the {key} {own[key]} and those of {node} "
                    f"{other[key]}: bring them into one form"
                )
    data = config.data
    most = max(table["classes"] for table in told.values())
    classes = len(own["class_names"]) or data.classes or len(data.class_names) or most
    mean, std = data.mean, data.std
    if data.normalize and not mean:
        mean, std = combine(table["sums"] for table in told.values()).mean_and_std()
    return InputSpec(
        own["shape"], own["dtype"], classes, mean, std, own["class_names"], own["columns"]
    )


def _read(node: str, answer: Any) -> dict[str, Any]:
    if not isinstance(answer, dict) or "error" in answer:
        raise ConfigError(f"{node} cannot read its data: its own output says why")
    try:
        total, squares = (
            torch.tensor(get_numbers(answer, key), dtype=torch.float64)
            for key in ("total", "squares")
        )
        return {
            "shape": get_counts(answer, "shape"),
            "dtype": get_text(answer, "dtype"),
            "classes": get_count(answer, "classes"),
            "class_names": get_texts(answer, "class_names"),
            "columns": get_texts(answer, "columns"),
            "sums": ChannelSums(get_count(answer, "count"), total, squares),
        }
    except ValueError as error:
        raise DataError(f"{node} tells of its inputs what cannot be ({error})") from None
