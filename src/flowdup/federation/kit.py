"""A node's kit: what was handed over is complete and unchanged, by the authority's signature.

`kit.json` lists a SHA-256 of every file in `startup` and `local`, signed with the authority's key.
Beware: who replaces the authority's certificate too makes a kit of another authority, which the
coordinator refuses when it connects.
"""

import base64
import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cryptography import x509
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import padding, rsa

from flowdup.errors import ConfigError
from flowdup.federation.folder import KIT_FILE, write_json
from flowdup.strict_json import get_object, get_text, read_object

_SEALED = ("startup", "local")
_ASK = "ask the coordinator for a new one"


@dataclass(frozen=True)
class Kit:
    """The files of a node."""

    path: Path
    node: str  # its name

    @property
    def settings(self) -> Path:
        """Where the node's data are, and what is withheld; read by the node's own process."""
        return self.path / "node.json"

    @property
    def federation(self) -> Path:
        """The checkpoint of the latest psi that the node was given."""
        return self.path / "federation"

    @property
    def models(self) -> Path:
        """Personal models, one file per client."""
        return self.path / "models"


def seal_kit(path: Path, node: str, state: Path) -> None:
    """List and sign the kit's files with the key in FLARE's state of an authority."""
    key = serialization.load_pem_private_key(
        json.loads(state.read_text())["root_pri_key"].encode(), None
    )
    assert isinstance(key, rsa.RSAPrivateKey)
    content = {"node": node, "files": _digests(path)}
    signature = key.sign(_text(content), padding.PKCS1v15(), hashes.SHA256())
    write_json(path / KIT_FILE, content | {"signature": base64.b64encode(signature).decode()})


def open_kit(path: Path) -> Kit:
    """The kit in a folder; ConfigError if it is none, or a file was changed, added or lost."""
    try:
        content = read_object((path / KIT_FILE).read_bytes())
        signature = base64.b64decode(get_text(content, "signature"), validate=True)
        node, files = get_text(content, "node"), get_object(content, "files")
        root = x509.load_pem_x509_certificate((path / "startup" / "rootCA.pem").read_bytes())
    except (OSError, ValueError):
        raise ConfigError(f"{path} is no kit of a node, or has lost files: {_ASK}") from None
    key = root.public_key()
    assert isinstance(key, rsa.RSAPublicKey)
    try:
        text = _text({"node": node, "files": files})
        key.verify(signature, text, padding.PKCS1v15(), hashes.SHA256())
    except InvalidSignature:
        raise ConfigError(f"{path / KIT_FILE} was changed: {_ASK}") from None
    found = _digests(path)
    for name in sorted({*found, *files}):
        if found.get(name) != files.get(name):
            what = "is missing" if name not in found else "does not belong to the kit"
            what = "was changed" if name in found and name in files else what
            raise ConfigError(f"{path / name} {what}: {_ASK}")
    return Kit(path.resolve(), node)


def authority_digest(kit: Path) -> str:
    """SHA-256 of the authority's certificate, in a node's or the coordinator's kit."""
    return hashlib.sha256((kit / "startup" / "rootCA.pem").read_bytes()).hexdigest()


def certificates_until(kit: Path) -> str:
    """The day on which the first certificate in a kit is no longer valid, such as 2027-11-12."""
    paths = [*(kit / "startup").glob("*.crt"), kit / "startup" / "rootCA.pem"]
    found = (x509.load_pem_x509_certificate(path.read_bytes()) for path in paths)
    return min(one.not_valid_after_utc for one in found).date().isoformat()


def _digests(path: Path) -> dict[str, Any]:
    files = (file for folder in _SEALED for file in (path / folder).rglob("*") if file.is_file())
    return {
        str(file.relative_to(path)): hashlib.sha256(file.read_bytes()).hexdigest()
        for file in sorted(files)
    }


def _text(content: dict[str, Any]) -> bytes:
    return json.dumps(content, sort_keys=True).encode()
