"""A user's clients dealt out to training, validation, test and certificate."""

from collections.abc import Mapping, Sequence
from itertools import islice

from flowdup.data.clients import ClientData
from flowdup.data.data_config import DataConfig
from flowdup.errors import ConfigError
from flowdup.random import Stream

_NEED_ONE = ("train", "validation", "test", "certify")  # a client with labels, in this order
_LEFT_OUT = "left out"  # by data.train_clients


def split_clients(
    clients: Sequence[ClientData], config: DataConfig, stream: Stream
) -> dict[str, list[ClientData]]:
    """The clients dealt out by the stream; training gets data.train_clients, or all that remain.

    Those with labels are dealt apart from the others, as `share_labels` says.
    """
    order = [clients[i] for i in stream.child("split").permutation(len(clients))]
    sizes = _sizes(len(order), config)
    labeled = [place for place, client in enumerate(order) if client.labeled]
    others = sorted({*range(len(order))} - {*labeled})
    shares = share_labels(len(labeled), sizes)
    from_labeled, from_others = iter(labeled), iter(others)
    groups = {}
    for name, size in sizes.items():
        places = [*islice(from_labeled, shares[name]), *islice(from_others, size - shares[name])]
        groups[name] = [order[place] for place in sorted(places)]
    return {name: members for name, members in groups.items() if name != _LEFT_OUT}


def share_labels(labeled: int, sizes: Mapping[str, int]) -> dict[str, int]:
    """How many clients with labels each group of these sizes gets: in proportion to them, but first
    one for training, one for validation and one for test, as far as they reach.
    """
    shares = dict.fromkeys(sizes, 0)
    for name in [n for n in _NEED_ONE if sizes.get(n)][:labeled]:
        shares[name] = 1
    per_client = labeled / max(sum(sizes.values()), 1)
    for _ in range(labeled - sum(shares.values())):
        open_groups = [name for name in sizes if shares[name] < sizes[name]]
        poorest = max(open_groups, key=lambda name: per_client * sizes[name] - shares[name])
        shares[poorest] += 1
    return shares


def _sizes(clients: int, config: DataConfig) -> dict[str, int]:
    """Of all groups, in the order in which they are dealt."""
    tested = config.validation_clients + config.test_clients
    held = tested + config.certify_clients
    if held + max(config.train_clients, 1) > clients:
        aside = f", {config.certify_clients} to certify" if config.certify_clients else ""
        raise ConfigError(
            f"{clients} clients cannot give {config.validation_clients} to validation, "
            f"{config.test_clients} to test{aside} and {config.train_clients or 'some'} to "
            "training: lower data.validation_clients, data.test_clients or data.train_clients"
        )
    train = config.train_clients or clients - held
    return {
        "validation": config.validation_clients,
        "test": config.test_clients,
        "certify": config.certify_clients,
        "train": train,
        _LEFT_OUT: clients - held - train,
    }
