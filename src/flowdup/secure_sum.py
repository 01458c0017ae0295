"""Secure aggregation: a sum of clients' vectors of which the coordinator sees the sum alone.

The protocol of Bonawitz et al., "Practical secure aggregation for privacy-preserving machine
learning" (CCS 2017), for a coordinator that follows it and is curious.  Members agree on pairwise
masks that cancel in the sum, and each adds one of its own.  Secrets are shared among all (Shamir),
so that the masks of a member that disappears can be taken off by the others:

    members                                coordinator
    Member.advertise() ----------- PublicKeys ---------->  all keys, to all
    Member.share(keys) ----------- sealed shares ------->  `route`d to whom they are for
    Member.mask(numbers, sealed) - masked numbers ------>  who answered, to those who answered
    Member.reveal(survivors) ----- Shares -------------->  `unmasked_sum`

A member never reveals a share of both secrets of another.  Everything that is sent is bytes and
numbers of members; how it travels is the caller's.

Beware: a coordinator that lies (about keys, or about who disappeared), alone or with more than
`threshold` members, can see a member's numbers: keys must come from someone whom members trust, as
the certificates of a federation.  What the sum itself tells is not hidden, and a member can send
any numbers, which nobody can check.  A `Member` is for one sum; make new ones for the next.
"""

import secrets
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple

import numpy as np
from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.ciphers import Cipher
from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305
from cryptography.hazmat.primitives.ciphers.algorithms import ChaCha20
from cryptography.hazmat.primitives.kdf.hkdf import HKDF
from numpy.typing import NDArray

from flowdup.errors import ConfigError, MessageError

Numbers = NDArray[np.uint32]  # modulo 2^32

_PRIME = 2**521 - 1  # of Shamir's field, above any secret of 32 bytes
_KEY, _NONCE = 32, 12  # bytes
_SHARE = 66  # bytes of a number of the field
_FEWEST = 3  # members: with two, each knows the other's numbers from the sum


class FixedPoint(NamedTuple):
    """Real numbers of magnitude `bound` at most as integers, whose sum over `clients` fits."""

    bound: float
    clients: int

    @property
    def step(self) -> float:
        """The distance between two numbers that can be told apart."""
        return self.bound * self.clients / (2**31 - 1 - self.clients)

    def encode(self, numbers: NDArray[np.float64]) -> Numbers:
        """The nearest integers, modulo 2^32; MessageError for a number out of bounds."""
        if not bool((np.abs(numbers) <= self.bound).all()):
            raise MessageError(
                f"an update has a number that is not finite or above {self.bound:.4g}: clip it "
                "first, or raise the bound"
            )
        return np.rint(numbers / self.step).astype(np.int64).astype(np.uint32)

    def decode(self, total: Numbers) -> NDArray[np.float64]:
        """The sum of numbers from the sum of their integers."""
        return total.astype(np.int32).astype(np.float64) * self.step


class PublicKeys(NamedTuple):
    """What a member tells everyone: a key for masks, and one to seal shares."""

    masks: bytes
    seals: bytes


class Shares(NamedTuple):
    """What a member reveals of others: of survivors their own mask, of others their key."""

    seeds: dict[int, bytes]
    keys: dict[int, bytes]


class Member:
    """One client in one secure sum; `context` names the sum, the same for all, and no other one."""

    def __init__(self, number: int, members: Sequence[int], threshold: int, context: bytes) -> None:
        check_threshold(len(set(members)), threshold)
        if number not in members or len(set(members)) < len(members) or min(members) < 0:
            raise ConfigError("a member of a secure sum is not among its members, or is so twice")
        self.number, self.members, self.threshold = number, list(members), threshold
        self.context, self.seed = context, secrets.token_bytes(_KEY)
        self._masks, self._seals = X25519PrivateKey.generate(), X25519PrivateKey.generate()
        self._keys: dict[int, PublicKeys] = {}
        self._held: dict[int, tuple[bytes, bytes]] = {}  # shares of others' seeds and keys
        self._done: set[str] = set()  # steps, each of which is taken once

    def advertise(self) -> PublicKeys:
        """The public halves of both keys."""
        return PublicKeys(
            self._masks.public_key().public_bytes_raw(), self._seals.public_key().public_bytes_raw()
        )

    def share(self, keys: Mapping[int, PublicKeys]) -> dict[int, bytes]:
        """Shares of this member's secrets, sealed for each of those who have told their keys."""
        found = {n: k for n, k in keys.items() if n in self.members}
        if found.get(self.number) != self.advertise() or len(set(found.values())) < len(found):
            raise MessageError("the keys of a secure sum are not those that were told: leave it")
        _check_enough(len(found), self.threshold)
        self._once("share")
        self._keys = found
        who = sorted(found)
        shares = [
            split_secret(secret, self.threshold, who)
            for secret in (self.seed, self._masks.private_bytes_raw())
        ]
        self._held[self.number] = (shares[0][self.number], shares[1][self.number])
        return {n: self._seal(n, shares[0][n] + shares[1][n]) for n in who if n != self.number}

    def mask(self, numbers: Numbers, sealed: Mapping[int, bytes]) -> bytes:
        """The numbers behind masks; `sealed` are the shares that others have sent to this one.

        Once: two sets of numbers behind the same masks would tell their difference.
        """
        for other, content in sealed.items():
            opened = self._open(other, content)
            self._held[other] = (opened[:_SHARE], opened[_SHARE:])
        _check_enough(len(self._held), self.threshold)
        self._once("mask")
        masked = numbers + expand(self.seed, numbers.size)
        for other in self._held:
            if other != self.number:
                seed = pair_seed(self._masks, self._keys[other].masks, self.context)
                masked = masked + signed_mask(seed, self.number, other, numbers.size)
        return masked.astype("<u4").tobytes()

    def reveal(self, survivors: Collection[int]) -> Shares:
        """Shares of survivors' own masks and of the others' keys, once; MessageError if too few
        survive.
        """
        alive = set(survivors)
        if not alive <= self._held.keys() or self.number not in alive:
            raise MessageError("a secure sum has survivors that cannot be: leave it")
        _check_enough(len(alive), self.threshold)
        self._once("reveal")
        return Shares(
            {n: held[0] for n, held in self._held.items() if n in alive},
            {n: held[1] for n, held in self._held.items() if n not in alive},
        )

    def _once(self, step: str) -> None:
        if step in self._done:
            raise MessageError(f"a secure sum asks a member twice to {step}: leave it")
        self._done.add(step)

    def _seal(self, other: int, content: bytes) -> bytes:
        nonce = secrets.token_bytes(_NONCE)
        return nonce + self._cipher(other).encrypt(nonce, content, self._label(self.number, other))

    def _open(self, other: int, content: bytes) -> bytes:
        try:
            if other not in self._keys:
                raise InvalidTag
            cipher, label = self._cipher(other), self._label(other, self.number)
            opened = cipher.decrypt(content[:_NONCE], content[_NONCE:], label)
        except (InvalidTag, ValueError):
            opened = b""
        if len(opened) != 2 * _SHARE:
            raise MessageError(f"the shares of member {other} cannot be opened: leave the sum")
        return opened

    def _cipher(self, other: int) -> ChaCha20Poly1305:
        seed = pair_seed(self._seals, self._keys[other].seals, b"seal" + self.context)
        return ChaCha20Poly1305(seed)

    def _label(self, sender: int, receiver: int) -> bytes:
        return b"%d to %d in " % (sender, receiver) + self.context


def check_threshold(members: int, threshold: int) -> None:
    """Refuse a threshold with which half of the members could be played against the others."""
    if members < _FEWEST or not members // 2 < threshold <= members:
        raise ConfigError(
            f"a secure sum of {members} members needs {_FEWEST} or more, and more than half of "
            f"them to survive, not {threshold}: ask more clients"
        )


def route(sent: Mapping[int, Mapping[int, bytes]]) -> dict[int, dict[int, bytes]]:
    """Sealed shares by receiver, and by sender in it; of those alone who have sent theirs."""
    return {
        receiver: {n: own[receiver] for n, own in sent.items() if receiver in own}
        for receiver in sent
    }


def unmasked_sum(
    keys: Mapping[int, PublicKeys],
    shared: Collection[int],
    masked: Mapping[int, bytes],
    revealed: Mapping[int, Shares],
    threshold: int,
    context: bytes,
) -> Numbers:
    """The coordinator's part: the sum of the numbers of all who sent masked ones.

    `shared` are those whose shares were routed.  MessageError if too few have survived.
    """
    check_threshold(len(keys), threshold)
    _check_enough(min(len(masked), len(revealed)), threshold)
    if not masked.keys() <= set(shared) or not revealed.keys() <= masked.keys():
        raise MessageError("a secure sum has numbers of a member that had left: drop them")
    size = len(next(iter(masked.values()))) // 4
    total: Numbers = np.zeros(size, np.uint32)
    for number, content in masked.items():
        if len(content) != 4 * size:
            raise MessageError(f"member {number} sent another number of numbers: drop it")
        total = total + np.frombuffer(content, "<u4").astype(np.uint32)
    for number in masked:
        seed = join_secret({n: own.seeds.get(number) for n, own in revealed.items()}, threshold)
        total = total - expand(seed, size)
    for gone in set(shared) - masked.keys():
        secret = join_secret({n: own.keys.get(gone) for n, own in revealed.items()}, threshold)
        private = X25519PrivateKey.from_private_bytes(secret)
        if private.public_key().public_bytes_raw() != keys[gone].masks:
            raise MessageError(f"the shares of member {gone} do not give its key: drop the sum")
        for number in masked:  # what the member that is gone left in the others' numbers
            mask = pair_seed(private, keys[number].masks, context)
            total = total - signed_mask(mask, number, gone, size)
    return total


def sound_keys(keys: Mapping[str, PublicKeys]) -> list[str]:
    """Whose keys the others can use: two of its own, which nobody else has told.

    Who makes keys by chance never has another's, so all who have the same one are left out.
    """
    told = Counter(key for own in keys.values() for key in own)
    found = []
    for owner, own in keys.items():
        try:
            for key in own:
                pair_seed(X25519PrivateKey.generate(), key, b"")
        except MessageError:
            continue
        if all(told[key] == 1 for key in own):
            found.append(owner)
    return found


def pair_seed(own: X25519PrivateKey, other: bytes, context: bytes) -> bytes:
    """What two members can compute of their keys, and nobody else."""
    try:
        agreed = own.exchange(X25519PublicKey.from_public_bytes(other))
    except ValueError:
        raise MessageError("a key of a secure sum is none: leave it") from None
    return HKDF(hashes.SHA256(), _KEY, salt=None, info=context).derive(agreed)


def expand(seed: bytes, count: int) -> Numbers:
    """Pseudo-random numbers of a seed that is used once: the key stream of ChaCha20."""
    stream = Cipher(ChaCha20(seed, bytes(16)), mode=None).encryptor().update(bytes(4 * count))
    return np.frombuffer(stream, "<u4").astype(np.uint32)


def signed_mask(seed: bytes, own: int, other: int, count: int) -> Numbers:
    """A pair's mask, which one of the two adds and the other one takes off."""
    mask = expand(seed, count)
    return mask if own < other else (np.uint32(0) - mask).astype(np.uint32)


def split_secret(secret: bytes, threshold: int, members: Sequence[int]) -> dict[int, bytes]:
    """Shamir's shares: any `threshold` of them give the secret, fewer give nothing."""
    coefficients = [int.from_bytes(secret, "big")]
    coefficients += [secrets.randbelow(_PRIME) for _ in range(threshold - 1)]
    found = {}
    for member in members:
        value = 0
        for coefficient in reversed(coefficients):
            value = (value * (member + 1) + coefficient) % _PRIME
        found[member] = value.to_bytes(_SHARE, "big")
    return found


def join_secret(shares: Mapping[int, bytes | None], threshold: int) -> bytes:
    """The secret of so many shares; MessageError if there are fewer, or they are of none."""
    given = {n + 1: int.from_bytes(s, "big") for n, s in shares.items() if s is not None}
    _check_enough(len(given), threshold)
    points = dict(list(given.items())[:threshold])
    secret = 0
    for x, y in points.items():
        above, below = 1, 1
        for z in points:
            if z != x:
                above, below = above * -z % _PRIME, below * (x - z) % _PRIME
        secret = (secret + y * above * pow(below, -1, _PRIME)) % _PRIME
    if secret >= 2 ** (8 * _KEY):
        raise MessageError("the shares of a secure sum do not fit together: drop the sum")
    return secret.to_bytes(_KEY, "big")


def _check_enough(members: int, threshold: int) -> None:
    if members < threshold:
        raise MessageError(
            f"{members} members are left in a secure sum and it needs {threshold}: drop it, and "
            "ask again"
        )
