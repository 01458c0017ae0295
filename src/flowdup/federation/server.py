"""The coordinator's server: FLARE's own program, and a record of whom it turns away.

FLARE says nowhere that a TLS handshake failed or that a command was not allowed.  Both are counted
here by reason, in a file that `flowdup federation status` shows and that stays small however often
somebody knocks.
"""

import ssl
import sys
import threading
import time
from pathlib import Path
from typing import Any

from nvflare.fuel.f3.mpm import MainProcessMonitor
from nvflare.fuel.sec.authz import AuthorizationService
from nvflare.private.fed.app.server import server_train

from flowdup.errors import shorten
from flowdup.federation.folder import FederationFolder, read_json, write_json

_WRITE_SECONDS = 1.0
_HANDSHAKES = {  # OpenSSL's reasons
    "PEER_DID_NOT_RETURN_A_CERTIFICATE": "a connection without a certificate",
    "TLSV1_ALERT_UNKNOWN_CA": "a connection of a party that trusts another authority",
}


class Refusals:
    """How often somebody was turned away and when last, by reason; written once a second."""

    def __init__(self, path: Path) -> None:
        self.path, self.lock, self.changed = path, threading.Lock(), threading.Event()
        self.table: dict[str, Any] = read_json(path)
        threading.Thread(target=self._write, daemon=True).start()

    def add(self, reason: str) -> None:
        """Count one more."""
        with self.lock:
            own = self.table.setdefault(shorten(reason, 200), {"count": 0})
            own |= {"count": own["count"] + 1, "last": round(time.time(), 3)}
        self.changed.set()

    def _write(self) -> None:
        while self.changed.wait():
            self.changed.clear()
            with self.lock:
                table = {reason: dict(own) for reason, own in self.table.items()}
            write_json(self.path, table)
            time.sleep(_WRITE_SECONDS)


def watch_handshakes(refusals: Refusals) -> None:
    """Count TLS handshakes that fail at this process's servers, by Python's own hook for them."""

    class Watched(ssl.SSLObject):
        def do_handshake(self) -> None:
            try:
                super().do_handshake()
            except (ssl.SSLWantReadError, ssl.SSLWantWriteError, ssl.SSLEOFError):
                raise  # it goes on, or the other side has left
            except ssl.SSLError as error:
                if self.server_side:
                    refusals.add(_reason(error))
                raise

    ssl.SSLContext.sslobject_class = Watched


def watch_commands(refusals: Refusals) -> None:
    """Count commands of administrators who have no right to them."""
    authorize = AuthorizationService.authorize

    def watched(context: Any) -> tuple[bool, str]:
        allowed, error = authorize(context)
        if not allowed or error:
            refusals.add(f"the command {context.right} of {context.user.name}, who has no right")
        return allowed, error

    AuthorizationService.authorize = watched


def main() -> None:
    """FLARE's main program of a server, watched; its arguments are FLARE's."""
    arguments = server_train.parse_arguments()
    refusals = Refusals(FederationFolder(Path(arguments.workspace).parent).refused)
    watch_handshakes(refusals)
    watch_commands(refusals)
    run = MainProcessMonitor.run
    sys.exit(run(main_func=server_train.main, run_dir=arguments.workspace, args=arguments))


def _reason(error: ssl.SSLError) -> str:
    if isinstance(error, ssl.SSLCertVerificationError):
        return f"a certificate that is none of this authority's ({error.verify_message})"
    found = str(error.reason)
    return _HANDSHAKES.get(found, f"a connection whose TLS handshake failed ({found.lower()})")


if __name__ == "__main__":
    main()
