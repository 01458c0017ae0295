"""Which clients may certify a run: labeled ones that nothing has used, or none."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from flowdup.config import Config
from flowdup.data import MEMORY, ClientData, LazyClients, Population, load_population
from flowdup.data.given_clients import read_given_clients
from flowdup.data.labels import LabeledTraits
from flowdup.errors import CertificateError
from flowdup.random import Stream


def certifying_clients(
    population: Population, config: Config, source: Path | None = None
) -> list[ClientData]:
    """The clients that the run set aside, or those of a folder, table or file that it never saw."""
    if source is not None:
        found: Sequence[ClientData] = read_given_clients(source, config.data, population.spec)
    else:
        found = population.certify
    if not found:
        raise CertificateError(
            "this run has set no clients aside, and those that trained, chose the round or were "
            "tested cannot certify it: train with data.certify_clients = 100, or give labeled "
            "clients that it has never seen with --input"
        )
    labeled = [client for client in found if client.labeled]
    if not labeled:
        raise CertificateError("no client that was set aside has labels: label some of them")
    listing = replace(population, certify=()).listing()
    refuse_used(labeled, listing, aside=source is None)
    return labeled


def refuse_used(
    clients: Sequence[ClientData], listing: Mapping[str, Any], aside: bool = True
) -> None:
    """Refuse clients whose data are in a listing: by their digest, or by the images they are of."""
    for group, rows in listing.items():
        members = [rows["first"]] if isinstance(rows, Mapping) else rows
        digests = {row["sha256"] for row in members}
        same_source = aside and group in ("train", "validation")  # test images are others
        images = {i for row in members for i in row.get("images", ())} if same_source else set()
        for client in clients:
            if client.is_among(digests) or not images.isdisjoint(client.images):
                raise CertificateError(
                    f"client '{client.name}' was used as a {group} client, so that its error says "
                    "nothing about new clients: certify with clients that nothing has used, by "
                    "data.certify_clients or --input"
                )


def with_all_labels(population: Population, config: Config) -> list[ClientData] | None:
    """The training clients with the labels that were hidden from training, for measuring only; None
    where they cannot be had.
    """
    if config.data.source == MEMORY or isinstance(population.train, LazyClients):
        return None
    data = replace(config.data, labeled_fraction=1.0, labeled_traits=LabeledTraits())
    found = load_population(data, Stream(config.seed).child("data")).train
    return list(found)
