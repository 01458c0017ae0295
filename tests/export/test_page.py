"""Page and bundle are served as they are, to this machine alone; samples go along if asked."""

import http.client
import json
import shutil
import socket
import struct
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from bundles import SMALL, train
from commands.here import flowdup as flowdup_here

import flowdup
from flowdup.data import load_population
from flowdup.errors import CheckpointError, FlowdupError
from flowdup.export import export_bundle
from flowdup.export.page import page_files, write_site
from flowdup.export.samples import sample_files
from flowdup.export.server import POLICY, PageServer, own_names
from flowdup.random import Stream

WEB = Path(__file__).parents[2] / "web"


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("run")
    train("plus", folder)
    return folder


@pytest.fixture(scope="module")
def bundle(run: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("bundles") / "digits"
    assert flowdup_here("export", run, "--out", out, "--samples", "3").code == 0
    return out


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A built page, as small as can be."""
    folder = tmp_path_factory.mktemp("page")
    (folder / "assets").mkdir()
    for name in ("index.html", "assets/a.js", "assets/a.css", "assets/a.wasm", "icon.svg"):
        (folder / name).write_text(name)
    return folder


@pytest.fixture(scope="module")
def server(bundle: Path, page: Path) -> Iterator[PageServer]:
    with PageServer(page_files(bundle, page)) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield server
        server.shutdown()
        thread.join()


def ask(
    server: PageServer, path: str, method: str = "GET", **headers: str
) -> tuple[int, http.client.HTTPMessage, bytes]:
    connection = http.client.HTTPConnection("127.0.0.1", server.server_port, timeout=10)
    connection.request(method, path, headers=headers)
    answer = connection.getresponse()
    content = answer.read()
    connection.close()
    return answer.status, answer.headers, content


def test_samples_are_a_runs_test_clients_with_what_is_known_of_them(
    run: Path, bundle: Path
) -> None:
    config = flowdup.load_config("digits-plus", [*SMALL, "data.validation_clients=19"])
    stream = Stream(config.seed).child("data")
    clients = load_population(config.data, stream).test[:3]
    listed = json.loads((bundle / "samples.json").read_bytes())["clients"]
    points = np.frombuffer((bundle / "samples.bin").read_bytes(), np.uint8).reshape(-1, 1, 8, 8)
    assert np.array_equal(points, np.concatenate([client.x.numpy() for client in clients]))
    for client, found in zip(clients, listed, strict=True):
        assert found["labels"] == client.labels.tolist() and len(client) == found["points"]
        assert (found["name"], found["traits"]) == (client.name, client.traits)
    sums = (bundle / "SHA256SUMS").read_text()
    assert "  samples.bin\n" in sums and "  samples.json\n" in sums
    assert sample_files([]) == {}


def test_a_bundle_without_samples_leaves_none_of_an_older_one(
    run: Path, bundle: Path, tmp_path: Path
) -> None:
    shutil.copytree(bundle, tmp_path, dirs_exist_ok=True)
    export_bundle(flowdup.load(run), tmp_path)
    sums = (tmp_path / "SHA256SUMS").read_text()
    assert not [*tmp_path.glob("samples*")] and "samples" not in sums


def test_more_samples_than_test_clients_are_refused(run: Path, tmp_path: Path) -> None:
    ended = flowdup_here("export", run, "--out", tmp_path / "b", "--samples", "6")
    assert ended.code == 2 and "has 5 test clients, too few for 6 samples" in ended.error


@pytest.mark.parametrize(
    ("path", "kind"),
    [
        ("/", "text/html; charset=utf-8"),
        ("/?runtime=webgpu", "text/html; charset=utf-8"),
        ("/assets/a.js", "text/javascript; charset=utf-8"),
        ("/assets/a.css", "text/css; charset=utf-8"),
        ("/assets/a.wasm", "application/wasm"),
        ("/icon.svg", "image/svg+xml"),
        ("/bundle/classifier.onnx", "application/octet-stream"),
        ("/bundle/manifest.json", "application/json"),
        ("/bundle/samples.bin", "application/octet-stream"),
    ],
)
def test_files_are_served_with_their_types_and_the_policy(
    server: PageServer, path: str, kind: str
) -> None:
    status, headers, content = ask(server, path)
    assert (status, headers["Content-Type"]) == (200, kind)
    assert headers["Content-Length"] == str(len(content)) and content
    assert headers["Content-Security-Policy"].startswith(POLICY)
    assert headers["X-Content-Type-Options"] == "nosniff"
    assert "connect-src 'self'" in POLICY and "default-src 'none'" in POLICY
    _, _, nothing = ask(server, path, "HEAD")
    assert nothing == b""


@pytest.mark.parametrize(
    "path",
    ["/nothing", "/../page.py", "/bundle/../index.html", "/bundle/", "/assets", "//etc/hosts"],
)
def test_nothing_else_is_served(server: PageServer, path: str) -> None:
    assert ask(server, path)[0] == 404


def test_a_name_of_another_site_that_leads_here_is_refused(server: PageServer) -> None:
    assert ask(server, "/", Host=f"localhost:{server.server_port}")[0] == 200
    for name in ("evil.example", f"evil.example:{server.server_port}", "localhost", "127.0.0.1"):
        assert ask(server, "/", Host=name)[0] == 403
    assert ask(server, "/", "POST")[0] == 501


def test_on_port_80_browsers_name_no_port() -> None:
    assert own_names(80) == {"localhost", "127.0.0.1", "localhost:80", "127.0.0.1:80"}
    assert own_names(8080) == {"localhost:8080", "127.0.0.1:8080"}


def test_a_browser_that_goes_away_is_no_error(
    server: PageServer, capfd: pytest.CaptureFixture[str]
) -> None:
    for text in (b"", b"GET / HT", b"GET / HTTP/1.1\r\nHost: evil\r\n\r\n"):
        with socket.create_connection(("127.0.0.1", server.server_port)) as connection:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            connection.sendall(text)
    assert ask(server, "/")[0] == 200
    assert capfd.readouterr().err == ""


def test_the_policy_is_the_one_in_the_page() -> None:
    text = (WEB / "index.html").read_text()
    assert f'http-equiv="Content-Security-Policy"\n      content="{POLICY}"' in text


def test_a_port_that_is_taken_is_refused(server: PageServer) -> None:
    with pytest.raises(FlowdupError, match=f"port {server.server_port} cannot be used"):
        PageServer({}, server.server_port)


def test_a_folder_for_any_web_server(bundle: Path, page: Path, tmp_path: Path) -> None:
    assert write_site(bundle, tmp_path, page) == 5 + 7
    assert (tmp_path / "assets/a.wasm").read_text() == "assets/a.wasm"
    for path in bundle.iterdir():
        assert (tmp_path / "bundle" / path.name).read_bytes() == path.read_bytes()


def test_what_is_missing_is_said(bundle: Path, page: Path, tmp_path: Path) -> None:
    with pytest.raises(FlowdupError, match="has no page: build it by `make web-page`"):
        page_files(bundle, tmp_path)
    with pytest.raises(
        CheckpointError, match=r"is no bundle, it has no manifest\.json: write one by"
    ):
        page_files(tmp_path, page)
    ended = flowdup_here("serve", tmp_path, "--no-browser")
    assert ended.code == 2 and "is no bundle" in ended.error
