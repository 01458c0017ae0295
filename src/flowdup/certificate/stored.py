"""certificate.json of a run folder, as far as personal models need it: levels of sets."""

from pathlib import Path
from typing import Any

from flowdup.certificate.prediction_sets import SetThresholds
from flowdup.errors import CheckpointError
from flowdup.strict_json import get_numbers, get_object, get_text, read_object

CERTIFICATE = "certificate.json"  # beside a checkpoint's folder, by `flowdup certify`


def read_thresholds(table: dict[str, Any]) -> SetThresholds:
    """Thresholds by coverage, as `dataclasses.asdict` has them; ValueError if they are none."""
    coverages, thresholds = get_numbers(table, "coverages"), get_numbers(table, "thresholds")
    if len(coverages) != len(thresholds) or list(coverages) != sorted(coverages):
        raise ValueError("its thresholds do not belong to its coverages")
    return SetThresholds(coverages, thresholds)


def certified_levels(
    folder: Path, psi_sha256: str, is_checkpoint: bool = False
) -> SetThresholds | None:
    """Levels of prediction sets (`own_thresholds.py`) by coverage, of a run folder's certificate;
    None where there is none, or one of another psi.

    A checkpoint's folder may have a copy of it; else that of the run folder around it counts.
    """
    around = [folder.absolute().parent] if is_checkpoint else []
    places = (place / CERTIFICATE for place in (folder, *around))
    path = next((place for place in places if place.is_file()), None)
    if path is None:
        return None
    try:
        found = read_object(path.read_text("utf-8"))
        same = get_text(found, "psi_sha256") == psi_sha256
        return read_thresholds(get_object(found, "levels")) if same else None
    except ValueError as error:
        raise CheckpointError(f"{path} is no certificate ({error}): certify again") from None
