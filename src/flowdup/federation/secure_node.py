"""A node's part in a secure sum: the updates of its clients are added up and sent behind masks.

Clients' updates are rounded to a fixed point one by one and added as integers, so that the whole
sum is what it would be in the open, to that rounding.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from flowdup.errors import MessageError
from flowdup.federation.secure_keys import SignedKeys, SumTerms, check_keys, sign_keys
from flowdup.messages import Reply, Schema
from flowdup.params import pack
from flowdup.secure_sum import FixedPoint, Member, Numbers
from flowdup.strict_json import get_count, get_number, get_text, get_texts, read_object

LOSS_SCALE = 16.0  # by which a loss is divided, so that one above the bound can be told


class SecureNode:
    """One node in one secure sum."""

    def __init__(self, kit: Path, node: str, terms: SumTerms) -> None:
        self.kit, self.node, self.terms = kit, node, terms
        if len(set(terms.nodes)) < len(terms.nodes):
            raise MessageError("a secure sum names a node twice: leave it")
        members = range(len(terms.nodes))
        number, threshold = terms.number(node), terms.threshold
        self.member = Member(number, members, threshold, terms.context)

    def keys(self) -> SignedKeys:
        """This node's, signed."""
        return sign_keys(self.kit, self.node, self.terms, self.member.advertise())

    def share(self, signed: Mapping[str, Any]) -> dict[str, bytes]:
        """Sealed shares by node, for those whose keys the authority vouches for."""
        keys = {
            self.terms.number(node): check_keys(self.kit, node, self.terms, own)
            for node, own in signed.items()
        }
        return {self.terms.nodes[n]: sealed for n, sealed in self.member.share(keys).items()}

    def mask(self, sealed: Mapping[str, bytes], replies: Sequence[Reply], schema: Schema) -> bytes:
        """The sum of these clients' updates and losses, behind masks."""
        fixed = FixedPoint(self.terms.bound, self.terms.clients)
        total: Numbers = np.zeros(numbers_of(schema), np.uint32)
        for reply in replies:
            total = total + fixed.encode(_numbers(reply, schema, self.terms.bound))
        return self.member.mask(total, {self.terms.number(n): own for n, own in sealed.items()})

    def reveal(self, survivors: Sequence[str]) -> dict[str, dict[str, bytes]]:
        """Shares that take the masks off the sum of the survivors, and nothing else."""
        shares = self.member.reveal([self.terms.number(node) for node in survivors])
        return {
            what: {self.terms.nodes[n]: share for n, share in own.items()}
            for what, own in zip(("seeds", "keys"), shares, strict=True)
        }


def numbers_of(schema: Schema) -> int:
    """How many numbers a sum has: those of psi, and the loss."""
    return sum(int(np.prod(shape)) for shape, _ in schema.values()) + 1


def terms_to_text(terms: SumTerms) -> str:
    """As a request that `read_terms` reads."""
    return json.dumps(asdict(terms))


def read_terms(text: str, most: int) -> SumTerms:
    """MessageError if the text has no terms."""
    try:
        if len(text) > most:
            raise ValueError("it is too long")
        table = read_object(text.encode())
        return SumTerms(
            get_count(table, "round"),
            get_texts(table, "nodes"),
            get_count(table, "clients"),
            get_number(table, "bound"),
            get_text(table, "nonce"),
        )
    except ValueError as error:
        raise MessageError(f"a request is malformed ({error}): drop it") from None


def _numbers(reply: Reply, schema: Schema, bound: float) -> NDArray[np.float64]:
    whole = reply.check_finite().whole_delta()
    delta = pack({n: whole[n] for n in schema}).cpu().double().numpy()
    loss = min(max(float(reply.loss) / LOSS_SCALE, -bound), bound)
    return np.append(delta, loss)
