"""A web server for the page and one bundle, on this machine alone."""

import sys
from collections.abc import Mapping
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from flowdup.errors import FlowdupError

HOST = "127.0.0.1"
# as in web/index.html, which tightens it once everything is loaded, and by header also no framing
POLICY = (
    "default-src 'none'; script-src 'self' 'wasm-unsafe-eval'; worker-src 'self' blob:; "
    "connect-src 'self'; img-src 'self'; style-src 'self'; base-uri 'none'; form-action 'none'"
)
_HEADERS = {
    "Content-Security-Policy": f"{POLICY}; frame-ancestors 'none'",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
    "Cache-Control": "no-cache",
}
_TYPES = {
    ".html": "text/html; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".mjs": "text/javascript; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".json": "application/json",
    ".svg": "image/svg+xml",
    ".wasm": "application/wasm",
    ".onnx": "application/octet-stream",
}


def own_names(port: int) -> set[str]:
    """What browsers call this server; they leave out the port where it is that of every site."""
    names = {HOST, "localhost"}
    return {f"{name}:{port}" for name in names} | (names if port == 80 else set())


class PageServer(ThreadingHTTPServer):
    """Serves files by their paths below the root, and nothing else; `port` 0 takes a free one."""

    daemon_threads = True

    def __init__(self, files: Mapping[str, Path], port: int = 0) -> None:
        self.files = files
        try:
            super().__init__((HOST, port), _Handler)
        except (OSError, OverflowError) as error:
            raise FlowdupError(
                f"port {port} cannot be used ({getattr(error, 'strerror', None) or error}): choose "
                "another by --port, or none for a free one"
            ) from None

    @property
    def url(self) -> str:
        """Where the page is."""
        return f"http://{HOST}:{self.server_port}/"

    def handle_error(self, request: Any, client_address: Any) -> None:
        """As for any server, but a browser may go away at any time."""
        if not isinstance(sys.exception(), ConnectionError):
            super().handle_error(request, client_address)


class _Handler(BaseHTTPRequestHandler):
    server: PageServer
    protocol_version = "HTTP/1.1"
    server_version, sys_version = "flowdup", ""

    def do_GET(self) -> None:
        self._answer(with_content=True)

    def do_HEAD(self) -> None:
        self._answer(with_content=False)

    def _answer(self, with_content: bool) -> None:
        path = self.server.files.get(urlsplit(self.path).path.removeprefix("/") or "index.html")
        if self.headers.get("Host") not in own_names(self.server.server_port):
            # another site's name that leads here
            return self._send(HTTPStatus.FORBIDDEN, b"", "text/plain", with_content)
        if path is None or not path.is_file():
            return self._send(HTTPStatus.NOT_FOUND, b"", "text/plain", with_content)
        kind = _TYPES.get(path.suffix, "application/octet-stream")
        return self._send(HTTPStatus.OK, path.read_bytes(), kind, with_content)

    def _send(self, status: HTTPStatus, content: bytes, kind: str, with_content: bool) -> None:
        self.send_response(status)
        about = {"Content-Type": kind, "Content-Length": str(len(content))}
        for name, value in (about | _HEADERS).items():
            self.send_header(name, value)
        self.end_headers()
        if with_content:
            self.wfile.write(content)

    def log_message(self, format: str, *args: object) -> None:
        """Nothing: a request is no event for a person."""
