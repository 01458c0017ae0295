"""User-level differential privacy: noise on the mean of clipped updates, and what it guarantees.

Every client's update is clipped to a norm C, and Gaussian noise of standard deviation z C is added
to their sum (McMahan, Ramage, Talwar, Zhang, "Learning differentially private recurrent language
models", ICLR 2018).  The guarantee is about the sequence of psi that training gives, between two
federations that differ in all data of one training client: it is *replaced* by another client, with
labels if it had labels and without if it had none (how many clients there are, and which have
labels, is public).  A replaced client moves the sum by 2 C at most, so the noise counts as z / 2.

Cohorts are drawn with a fixed size, without replacement, labeled and unlabeled clients apart; a
client's chance of being drawn is that of its own part, and the epsilon that is told is that of the
part that is worse off.  The bound is that of Wang, Balle, Kasiviswanathan, "Subsampled Renyi
differential privacy and analytical moments accountant", AISTATS 2019, as `dp-accounting` has it.

Beware: losses and accuracies in the metrics, statistics of the data that inputs are normalised by,
and what validation clients decide (which round is kept) are not noised.
"""

import hashlib
import importlib.util
import math
import struct
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from flowdup.aggregation import Noise
from flowdup.errors import ConfigError
from flowdup.params import Params, digest, pack, unpack
from flowdup.random import Stream, Words
from flowdup.settings import check_range

_ORDERS = (*range(2, 33), 36, 40, 48, 56, 64, 80, 96, 128)  # of Renyi divergences
_SECRET = 32  # bytes at least
_MOST_SECRET = 2**20
_TOLERANCE = 1e-4  # relative, of a noise that is searched for


@dataclass(frozen=True)
class PrivacyConfig:
    """Settings of `server.privacy`: noise for user-level differential privacy."""

    noise: float = 0.0  # the noise on the sum of updates, in norm bounds (its z); 0: none
    delta: float = 1e-5  # at which epsilon is told
    secret: str = ""  # a file of 32 or more random bytes that the noise is made of;
    # without it, who knows the run's seed can take the noise off: for experiments

    def __post_init__(self) -> None:
        check_range("server.privacy.noise", self.noise, 0)
        if not 0 < self.delta < 1:
            raise ConfigError(f"server.privacy.delta is between 0 and 1, not {self.delta}")


def gaussian_noise(config: PrivacyConfig, norm_bound: float, stream: Stream, round: int) -> Noise:
    """What is added to a round's mean update: standard deviation noise * norm_bound / clients.

    It follows from the secret (or seed), the round, the deviation and every bit of the mean itself.
    A round that is done again to the same mean has the same noise, and tells nothing new.  Any
    other mean (of other nodes, of changed data, in another run with the same secret) has
    independent noise: with the same one, the difference of two psi would have none at all.  That
    is why the cohort or psi would not do as a name for it: behind both, a client's data may change.
    Beware: where sums differ in their last bit (another engine or machine), so does all noise.
    """
    secret = read_secret(config.secret) if config.secret else b""

    def add(delta: Params, clients: int) -> Params:
        vector, deviation = pack(delta), config.noise * norm_bound / clients
        count = 4 * -(-vector.numel() // 2)
        what = hashlib.sha256(struct.pack("<qd", clients, deviation) + digest(delta)).digest()
        draw = stream.child("privacy", round, what.hex())
        words = _secret_words(secret, round, what, count) if secret else draw.words(count)
        drawn = torch.from_numpy(normal(words)[: vector.numel()])
        return unpack(vector + (deviation * drawn).to(vector), delta)

    return add


def normal(words: Words) -> NDArray[np.float64]:
    """Standard normal numbers, two of four words each (Box and Muller, with 53 bits)."""
    a, b, c, d = words.reshape(-1, 4).T.astype(np.float64)
    first = (np.floor(a / 32) * 2**26 + np.floor(b / 64) + 0.5) * 2.0**-53  # in (0, 1)
    second = (np.floor(c / 32) * 2**26 + np.floor(d / 64) + 0.5) * 2.0**-53
    radius, angle = np.sqrt(-2 * np.log(first)), 2 * np.pi * second
    return np.stack([radius * np.cos(angle), radius * np.sin(angle)], 1).reshape(-1)


def read_secret(path: str) -> bytes:
    """The bytes in a file; ConfigError if there are too few."""
    try:
        with Path(path).open("rb") as file:
            content = file.read(_MOST_SECRET)
    except OSError as error:
        raise ConfigError(
            f"cannot read server.privacy.secret, {path}: {error.strerror}; write 32 random bytes "
            "into a file that only the coordinator can read"
        ) from None
    if len(content) < _SECRET:
        raise ConfigError(
            f"{path} has {len(content)} bytes, a secret needs {_SECRET}: make them with "
            "`head -c 32 /dev/urandom`"
        )
    return content


def secret_stream(path: str) -> Stream:
    """Of which cohorts are drawn: a guarantee that counts on chance needs one nobody can foresee.

    Beware: Philox is no cipher; it is enough where only psi is seen, and not the cohorts.
    """
    seed = hashlib.sha256(b"flowdup cohorts" + read_secret(path)).digest()
    return Stream(int.from_bytes(seed, "little"))


def _secret_words(secret: bytes, round: int, what: bytes, count: int) -> Words:
    """By SHAKE-256, so that a resumed round has the same noise and nobody else can make it."""
    key = hashlib.sha256(b"flowdup noise" + secret).digest()
    content = hashlib.shake_256(key + round.to_bytes(8, "little") + what).digest(4 * count)
    return np.frombuffer(content, "<u4").astype(np.uint32)


class Draw(NamedTuple):
    """How one part of a cohort is drawn: so many of so many, without replacement."""

    drawn: int
    of: int

    def possible(self) -> "Draw":
        """All of them where they are fewer than should be drawn."""
        return self._replace(drawn=min(self))


class PrivateRounds(NamedTuple):
    """Rounds with the same noise and the same cohorts."""

    noise: float
    parts: tuple[Draw, ...]  # labeled, unlabeled: a client is in the same part in all rounds
    rounds: int


def after_round(
    history: Sequence[PrivateRounds], noise: float, parts: tuple[Draw, ...]
) -> tuple[PrivateRounds, ...]:
    """The history with one round more, drawn of the clients that could be reached in it."""
    if history and history[-1][:2] == (noise, parts):
        return (*history[:-1], history[-1]._replace(rounds=history[-1].rounds + 1))
    return (*history, PrivateRounds(noise, parts, 1))


def epsilon(history: Iterable[PrivateRounds], delta: float) -> float:
    """What all these rounds together cost a client at most, at this delta."""
    totals: dict[int, NDArray[np.float64]] = {}
    for stage in history:
        for part, draw in enumerate(stage.parts):
            if draw.drawn and stage.rounds:
                spent = stage.rounds * _renyi(stage.noise, draw)
                totals[part] = totals.get(part, 0.0) + spent
    return max((_to_epsilon(spent, delta) for spent in totals.values()), default=0.0)


def noise_for(
    target: float, parts: Sequence[Draw], rounds: int, delta: float, most: float = 1e4
) -> float:
    """The least noise with which so many rounds cost `target` at most."""

    def spent(noise: float) -> float:
        return epsilon([PrivateRounds(noise, tuple(parts), rounds)], delta)

    low, high = 0.0, most
    if spent(high) > target:
        raise ConfigError(f"no noise gives an epsilon of {target}: allow more, or train less")
    while high - low > _TOLERANCE * high:
        middle = (low + high) / 2 if low > high / 10 else math.sqrt(max(low, 1e-3) * high)
        low, high = (low, middle) if spent(middle) <= target else (middle, high)
    return high


def check_accountant(delta: float, parts: Iterable[Draw]) -> None:
    """Refuse a run whose epsilon nobody could tell, or would mean nothing."""
    if importlib.util.find_spec("dp_accounting") is None:
        raise ConfigError(
            "server.privacy needs dp-accounting, which is not installed: run `pip install "
            "'flowdup[privacy]'`, or set server.privacy.noise = 0"
        )
    clients = sum(draw.of for draw in parts)
    if delta * clients >= 1:
        raise ConfigError(
            f"server.privacy.delta is {delta}, with {clients} clients it must be below "
            f"{1 / clients:.2g}, or publishing one client's data would be allowed: lower it"
        )


@cache
def _renyi(noise: float, draw: Draw) -> NDArray[np.float64]:
    """The Renyi divergences of one round, by `_ORDERS`."""
    accounting: Any = _accounting()
    event = accounting.GaussianDpEvent(noise / 2)  # a client is replaced: 2 norm bounds
    sampled = accounting.SampledWithoutReplacementDpEvent(draw.of, draw.drawn, event)
    replaced = accounting.NeighboringRelation.REPLACE_ONE
    accountant = accounting.rdp.RdpAccountant(_ORDERS, replaced)
    accountant.compose(sampled)
    found: NDArray[np.float64] = np.array(accountant.rdp)
    return found


def _to_epsilon(spent: NDArray[np.float64], delta: float) -> float:
    accounting: Any = _accounting()
    found, _ = accounting.rdp.compute_epsilon(_ORDERS, spent, delta)
    return float(found)


def _accounting() -> Any:
    import dp_accounting  # noqa: PLC0415  (an extra)

    return dp_accounting
