"""Keys of a secure sum, signed with the certificates of nodes, so that no one can put in others.

A coordinator that could give members keys of its own would see their numbers.  So a node signs its
public keys, for one sum alone, with the key in its kit, and every other node checks the signature
and that the federation's authority has made the certificate for a node of that name: the
coordinator has certificates of the same authority, and they are no node's.
"""

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cryptography import x509
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import padding, rsa
from cryptography.x509.oid import NameOID

from flowdup.errors import MessageError
from flowdup.federation.folder import NODES_ORG
from flowdup.secure_sum import PublicKeys

SignedKeys = dict[str, bytes]  # masks, seals, certificate, signature
_FIELDS = ("masks", "seals", "certificate", "signature")
_MOST_CERTIFICATE = 2**14  # bytes
FEWEST = 3  # members of a sum


@dataclass(frozen=True)
class SumTerms:
    """What all members of one sum must agree on."""

    round: int
    nodes: tuple[str, ...]  # in the order by which members are numbered
    clients: int  # of all nodes together
    bound: float  # the largest magnitude of a number of an update
    nonce: str  # that no other sum has

    @property
    def threshold(self) -> int:
        """Members that must stay to the end: more than half, and never fewer than three."""
        return max(len(self.nodes) // 2 + 1, FEWEST)

    @property
    def context(self) -> bytes:
        """What names this sum and no other."""
        told = [self.round, *self.nodes, self.clients, self.bound, self.nonce]
        return hashlib.sha256(b"flowdup secure sum" + json.dumps(told).encode()).digest()

    def number(self, node: str) -> int:
        """Of a member; MessageError for one that is none."""
        if node not in self.nodes:
            raise MessageError("a secure sum names a node that is no member: leave it")
        return self.nodes.index(node)


def sign_keys(kit: Path, node: str, terms: SumTerms, keys: PublicKeys) -> SignedKeys:
    """Keys with the node's certificate and signature."""
    key = serialization.load_pem_private_key((kit / "startup" / "client.key").read_bytes(), None)
    assert isinstance(key, rsa.RSAPrivateKey)
    text = _text(node, terms, keys)
    return {
        "masks": keys.masks,
        "seals": keys.seals,
        "certificate": (kit / "startup" / "client.crt").read_bytes(),
        "signature": key.sign(text, padding.PKCS1v15(), hashes.SHA256()),
    }


def check_keys(kit: Path, node: str, terms: SumTerms, signed: Any) -> PublicKeys:
    """A node's keys; MessageError unless the authority of the kit vouches for them."""
    fits = isinstance(signed, dict) and all(isinstance(signed.get(f), bytes) for f in _FIELDS)
    if not fits or len(signed["certificate"]) > _MOST_CERTIFICATE:
        raise MessageError(f"{node} sent no keys for a secure sum: leave it out")
    root = x509.load_pem_x509_certificate((kit / "startup" / "rootCA.pem").read_bytes())
    keys = PublicKeys(signed["masks"], signed["seals"])
    try:
        certificate = x509.load_pem_x509_certificate(signed["certificate"])
        certificate.verify_directly_issued_by(root)
        public = certificate.public_key()
        if not _is_of(node, certificate.subject) or not isinstance(public, rsa.RSAPublicKey):
            raise ValueError
        text = _text(node, terms, keys)
        public.verify(signed["signature"], text, padding.PKCS1v15(), hashes.SHA256())
    except (ValueError, TypeError, InvalidSignature):
        raise MessageError(
            f"the keys of {node} for a secure sum are not signed with its certificate: leave it out"
        ) from None
    return keys


def _is_of(node: str, subject: x509.Name) -> bool:
    """Whether a certificate's subject is this node: others name another organization, or a role."""
    return {*subject} == {
        x509.NameAttribute(NameOID.COMMON_NAME, node),
        x509.NameAttribute(NameOID.ORGANIZATION_NAME, NODES_ORG),
    }


def _text(node: str, terms: SumTerms, keys: PublicKeys) -> bytes:
    told = [terms.context.hex(), node, keys.masks.hex(), keys.seals.hex()]
    return json.dumps(told).encode()
