"""Real processes over loopback with mutual TLS: the simulator's psi, no data in any message, who is
refused, and a coordinator that is killed.
"""

import json
import os
import socket
import ssl
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from nearby import NODES, TABLE, NearbyFederation, population_of, write_data

import flowdup
from flowdup.checkpoint import load_checkpoint
from flowdup.config import Config, read_config
from flowdup.data import Population
from flowdup.errors import FederationError
from flowdup.federation.folder import FederationFolder, FederationNames
from flowdup.federation.local import LocalFederation
from flowdup.federation.provision import init_federation
from flowdup.federation.record import read_rounds
from flowdup.federation.session import session, write_job
from flowdup.methods import Params
from flowdup.run.folder import RunFolder
from flowdup.run.training import train_run
from flowdup.settings import to_toml

SLOW = TABLE | {  # a round takes half a second, and a kill comes in the middle of it
    "client": {"batch_size": 10, "clip": 0.0, "epochs": 50, "optimizer": {"lr": 0.01}},
    "server": {"rounds": 8, "cohort": 6, "alpha": 0.5},
}
# after so many rounds, and this share of the next: of all that a round does, and of a whole run
KILLS = ((0, 0.5), (1, 0.1), (3, 0.9), (4, 0.3), (6, 0.7))


@pytest.fixture(scope="module")
def local(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalFederation]:
    root = tmp_path_factory.mktemp("deployed")
    with LocalFederation(root) as found:
        recorder = Path(__file__).parent / "recorder"
        (root / "recorded").mkdir()
        path = os.pathsep.join(map(str, (recorder, Path(flowdup.__file__).parents[1])))
        found.environment |= {"PYTHONPATH": path, "RECORDED": str(root / "recorded")}
        for name, table in (("quick", TABLE), ("slow", SLOW)):
            (root / f"{name}.toml").write_text(to_toml(read_config(table)))
        found.init(NODES)
        write_data(root, population_of(read_config(TABLE)))
        found.start_server()
        for node in NODES:
            found.start_node(node)
        yield found


def psi(run: Path) -> Params:
    return load_checkpoint(run / "checkpoint")[1].psi


def apart(a: Params, b: Params) -> float:
    return max(float((a[n] - b[n]).abs().max()) for n in a)


def simulated(config: Config, out: Path) -> Params:
    for _ in train_run(config, out, population=population_of(config)):
        pass
    return psi(out)


def test_psi_is_the_simulators_and_no_message_holds_data(local: LocalFederation) -> None:
    config, out = read_config(TABLE), local.folder.path / "quick"
    done = local.command(
        *("federation", "run", str(local.root / "quick.toml"), str(local.folder.path)),
        *("--out", str(out)),
    )
    assert done.returncode == 0, done.stderr
    assert apart(psi(out), simulated(config, local.root / "simulated")) < 1e-5
    for node in NODES:
        assert len(list((local.folder.kit(node) / "models").iterdir())) == 3
    told = local.command(
        "federation", "status", str(local.folder.path), "--out", str(out), "--json"
    )
    status = json.loads(told.stdout)
    assert (status["server"], status["round"]) == ("up", 6)
    assert all(row["alive"] and row["bytes_up"] > 0 for row in status["nodes"])
    recorded = b"".join(p.read_bytes() for p in (local.root / "recorded").iterdir())
    largest = max(psi(out).values(), key=lambda p: p.numel())
    assert largest.numpy().tobytes()[:64] in recorded  # as it was sent in the end: they are read
    found = [what for what, content in traces(population_of(config)) if content in recorded]
    assert not found


def traces(population: Population) -> Iterator[tuple[str, bytes]]:
    """Every image in any form that it could be sent in, names, and the labels of every client."""
    mean, std = population.spec.mean[0], population.spec.std[0]
    for number, client in enumerate([*population.train, *population.validation]):
        for place, image in enumerate(client.x.numpy()):
            read = (image / 255 - mean) / std
            for kind in (np.uint8, np.int32, np.int64, np.float16, np.float32, np.float64):
                yield f"image {place} of {number} as {kind}", image.astype(kind).tobytes()
                if kind not in (np.uint8, np.int32, np.int64):
                    yield f"scaled {place} of {number}", (image / 255).astype(kind).tobytes()
                    yield f"normalised {place} of {number}", read.astype(kind).tobytes()
        if client.y is not None:
            for kind in (np.uint8, np.int32, np.int64, np.float32):
                yield f"labels of {number}", client.y.numpy().astype(kind).tobytes()
    yield "a client's name", b"client-001"
    yield "another's", b"held-000"


def served(port: int, kit: Path | None, root: Path, key: str = "client") -> bool:
    """Whether the server speaks to a party with this kit's certificate."""
    context = ssl.create_default_context(cafile=str(root / "startup" / "rootCA.pem"))
    context.set_alpn_protocols(["h2"])
    if kit is not None:
        startup = kit / "startup"
        context.load_cert_chain(startup / f"{key}.crt", startup / f"{key}.key")
    try:
        with (
            socket.create_connection(("localhost", port), 5) as plain,
            context.wrap_socket(plain, server_hostname="localhost") as secured,
        ):
            secured.sendall(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes(9))
            return bool(secured.recv(16))
    except (ssl.SSLError, ConnectionError, TimeoutError):
        return False


def test_only_certificates_of_the_authority_are_served(
    local: LocalFederation, tmp_path: Path
) -> None:
    other = FederationFolder(tmp_path / "other")
    init_federation(other, FederationNames("localhost", 8002, NODES))
    port, own = local.folder.read_names().port, local.folder.kit("north")
    assert served(port, own, own)
    assert not served(port, None, own)
    assert not served(port, other.kit("north"), own)  # the same name, another authority
    assert not served(port, own, other.kit("north"))  # whose node would not trust the server


def test_a_role_without_the_right_cannot_submit(local: LocalFederation, tmp_path: Path) -> None:
    write_job(tmp_path / "job", local.folder.path, NODES, 1)
    with session(local.folder.viewer) as viewer:
        assert {*viewer.connected()} == {*NODES}  # it may look
        with pytest.raises(FederationError, match="no right to submit"):
            viewer.submit(tmp_path / "job")


def test_code_in_a_job_is_refused(local: LocalFederation, tmp_path: Path) -> None:
    job, ran = tmp_path / "job", tmp_path / "ran"
    write_job(job, local.folder.path, NODES, 1)
    config = job / "node" / "config" / "config_fed_client.json"
    config.write_text(config.read_text().replace("flowdup.federation.node.Node", "spy.Spy"))
    (job / "node" / "custom").mkdir()
    (job / "node" / "custom" / "spy.py").write_text(
        f"open({str(ran)!r}, 'w').close()\nclass Spy: pass\n"
    )
    with session(local.folder.admin) as admin:
        submitted = admin.submit(job)
        until = time.monotonic() + 60
        while not admin.is_over(submitted):
            assert time.monotonic() < until
            time.sleep(1)
        told = admin.why_not_started(submitted)
    assert [node for node in NODES if f"{node}: NVFLARE_ERROR: BYOC not permitted" in told] == [
        *NODES
    ]
    assert not ran.exists()


def test_a_coordinator_killed_five_times_reaches_the_same_psi(local: LocalFederation) -> None:
    out = local.folder.path / "slow"
    words = ("federation", "run", str(local.root / "slow.toml"), str(local.folder.path))
    words = (*words, "--out", str(out), "--resume")  # as a service is started, again and again
    reached = []
    for rounds, share in KILLS:
        local.start("run", *words)
        wait_for(lambda done=rounds: (out / "nodes.json").exists() and done_rounds(out) >= done)
        seconds = [row["seconds"] for row in read_rounds(out)]
        time.sleep(share * min(seconds, default=1.0))
        for name in ("server", "run"):  # the job is a child of the server
            local.kill(name)
        reached.append(load_checkpoint(out / "checkpoint")[1].round)
        local.start_server()
    assert all(done <= found <= done + 1 for (done, _), found in zip(KILLS, reached, strict=True))
    assert len(set(reached)) == len(KILLS) and reached[-1] < 8  # each goes on from another round
    done = local.command(*words)
    assert done.returncode == 0, done.stderr
    unbroken = NearbyFederation(local.root / "unbroken", SLOW)
    unbroken.train(unbroken.nodes())
    assert apart(psi(out), psi(unbroken.run)) == 0  # to the bit


def done_rounds(out: Path) -> int:
    return RunFolder(out).count_rounds()


def wait_for(event: Callable[[], bool]) -> None:
    until = time.monotonic() + 120
    while not event():
        assert time.monotonic() < until
        time.sleep(0.02)
