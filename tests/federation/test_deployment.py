"""Real processes over loopback with mutual TLS: the simulator's psi, no data in any message, who is
refused, and a coordinator that is killed.
"""

import json
import os
import shutil
import socket
import ssl
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from nearby import NODES, TABLE, NearbyFederation, population_of, write_data

import flowdup
from flowdup.checkpoint import load_checkpoint
from flowdup.config import Config, read_config
from flowdup.data import Population
from flowdup.errors import FederationError
from flowdup.federation.folder import FederationFolder, FederationNames, read_json
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
    "server": {"rounds": 10, "cohort": 6, "alpha": 0.5},
}
SECURE = SLOW | {
    "method": TABLE["method"] | {"correction": "em"},
    "server": {"rounds": 6, "cohort": 12, "alpha": 0.25},
}
# after so many rounds, and this share of the next: of all that a round does, and of a whole run
KILLS = ((0, 0.5), (1, 0.1), (3, 0.8), (5, 0.3), (7, 0.6))


@pytest.fixture(scope="module")
def local(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalFederation]:
    root = tmp_path_factory.mktemp("deployed")
    with LocalFederation(root) as found:
        recorder = Path(__file__).parent / "recorder"
        (root / "recorded").mkdir()
        path = os.pathsep.join(map(str, (recorder, Path(flowdup.__file__).parents[1])))
        found.environment |= {"PYTHONPATH": path, "RECORDED": str(root / "recorded")}
        for name, table in (("quick", TABLE), ("slow", SLOW), ("secure", SECURE)):
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
    run(local, "quick", "quick")
    assert apart(psi(out), simulated(config, local.root / "simulated")) < 1e-5
    for node in NODES:
        assert len(list((local.folder.kit(node) / "models").iterdir())) == 3
    found = status(local, "quick")
    assert (found["server"], found["round"]) == ("up", 6)
    assert all(row["alive"] and row["bytes_up"] > 0 for row in found["nodes"])
    sent = recorded(local)
    largest = max(psi(out).values(), key=lambda p: p.numel())
    assert largest.numpy().tobytes()[:64] in sent  # as it was sent in the end: they are read
    assert b"delta/" in sent or b"left/" in sent
    leaked = [what for what, content in traces(population_of(config)) if content in sent]
    assert not leaked


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
    told = refused(local, 3)
    assert [line for line in told if "without a certificate" in line]
    assert [line for line in told if "none of this authority's" in line]
    assert [line for line in told if "trusts another authority" in line]


def refused(local: LocalFederation, reasons: int) -> list[str]:
    """What `status` says was turned away, once there are so many reasons."""
    wait_for(lambda: len(read_json(local.folder.refused)) >= reasons)
    told = local.command("federation", "status", str(local.folder.path))
    assert told.returncode == 0, told.stderr
    return [line for line in told.stdout.splitlines() if line.startswith("turned away")]


def test_a_role_without_the_right_cannot_submit(local: LocalFederation, tmp_path: Path) -> None:
    write_job(tmp_path / "job", local.folder.path, NODES, 1)
    with session(local.folder.viewer) as viewer:
        assert {*viewer.connected()} == {*NODES}  # it may look
        with pytest.raises(FederationError, match="no right to submit"):
            viewer.submit(tmp_path / "job")
    assert [line for line in refused(local, 4) if "submit_job of viewer" in line]


def test_a_tampered_kit_does_not_start(local: LocalFederation, tmp_path: Path) -> None:
    kit = tmp_path / "north"
    shutil.copytree(local.folder.kit("north"), kit)
    settings = kit / "local" / "resources.json"
    settings.write_text(settings.read_text().replace("flowdup.federation.node.Node", "os.system"))
    done = local.command("node", str(kit), "--data", str(local.root / "data" / "north"), timeout=60)
    assert done.returncode != 0 and "resources.json was changed" in done.stderr


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
    # as a service is started, again and again; whole updates, factors being the default
    more = ("--out", str(out), "--resume", "--encoding", "plain")
    reached = []
    for rounds, share in KILLS:
        local.start("run", *words, *more)
        wait_for(partial(is_at, out, rounds))
        seconds = [row["seconds"] for row in read_rounds(out)]
        time.sleep(share * min(seconds, default=1.0))
        for name in ("server", "run"):  # the job is a child of the server
            local.kill(name)
        reached.append(load_checkpoint(out / "checkpoint")[1].round)
        local.start_server()
    pairs = zip(KILLS, reached, strict=True)  # a kill may come between metrics and checkpoint
    assert all(done - 1 <= found for (done, _), found in pairs), reached
    assert len(set(reached)) > 3 and reached[-1] < 10  # other rounds, and before the last
    done = local.command(*words, *more)
    assert done.returncode == 0, done.stderr
    unbroken = NearbyFederation(local.root / "unbroken", SLOW)
    unbroken.train(unbroken.nodes(), encoding="plain")
    assert apart(psi(out), psi(unbroken.run)) == 0  # to the bit
    assert apart(psi(out), simulated(read_config(SLOW), local.root / "simulated-slow")) < 1e-5


LONG = """
from flowdup.federation.stage import NodeStage
train = NodeStage.train
NodeStage.train = lambda self, data: [content + bytes(10**7) for content in train(self, data)]
"""


def test_messages_over_the_limit_are_refused_until_the_node_is_suspended(
    local: LocalFederation,
) -> None:
    (local.root / "long.py").write_text(LONG)
    local.kill("west")
    local.start_node("west", "--import", str(local.root / "long.py"))
    run(local, "quick", "long")
    found = status(local, "long")
    (west,) = (row for row in found["nodes"] if row["node"] == "west")
    assert west["suspended"] and len(west["refusals"]) == 3
    assert all("bytes and may have" in refusal["reason"] for refusal in west["refusals"])
    assert found["round"] == 6 and west["last_round"] == 0
    words = ("federation", "run", str(local.root / "quick.toml"), str(local.folder.path))
    local.start("run", *words, "--out", str(local.folder.path / "suspended"))
    wait_for(lambda: "job 1 begins with north, south\n" in local.output("run"))  # and without it,
    assert all(row["alive"] for row in status(local, "suspended")["nodes"])  # which is there
    local.kill("run")
    local.kill("west")
    assert local.command("federation", "readmit", "west", str(local.folder.path)).returncode == 0


def test_a_secure_sum_goes_on_when_a_node_is_killed_and_a_new_one_has_joined(
    local: LocalFederation,
) -> None:
    added = local.command("federation", "add", "east", str(local.folder.path))
    assert added.returncode == 0, added.stderr
    shutil.copytree(local.root / "data" / "west", local.root / "data" / "east")
    for node in ("west", "east"):
        local.start_node(node)
    for file in (local.root / "recorded").iterdir():
        file.unlink()
    words = ("federation", "run", str(local.root / "secure.toml"), str(local.folder.path))
    out = local.folder.path / "secure"
    local.start("run", *words, "--out", str(out), "--secure-sum")
    wait_for(lambda: done_rounds(out) >= 2)
    time.sleep(0.6 * min(row["seconds"] for row in read_rounds(out)))  # in the middle of a round
    local.kill("south")
    assert local.wait("run", 240) == 0, local.output("run")
    rounds = read_rounds(out)
    without = [row for row in rounds if "south" in row["missing"]]
    assert len(without) == 1 and len(without[0]["answered"]) == 3
    assert [row["round"] for row in rounds] == [*range(1, 7)]
    sent = recorded(local)
    assert b"psi/" in sent and b"delta/" not in sent and b"left/" not in sent
    correction = load_checkpoint(out / "checkpoint")[1].correction
    assert float(correction["bias"].abs().max()) > 0
    for node in ("north", "west", "east"):  # whose models have it
        assert load_checkpoint(local.folder.kit(node) / "federation")[1].correction.keys()


def run(local: LocalFederation, config: str, out: str, *more: str) -> str:
    """What a run that ends well says."""
    words = ("federation", "run", str(local.root / f"{config}.toml"), str(local.folder.path))
    done = local.command(*words, "--out", str(local.folder.path / out), *more)
    assert done.returncode == 0, done.stderr
    return done.stdout


def status(local: LocalFederation, out: str) -> dict[str, Any]:
    words = ("federation", "status", str(local.folder.path), "--json")
    told = local.command(*words, "--out", str(local.folder.path / out))
    found: dict[str, Any] = json.loads(told.stdout)
    return found


def recorded(local: LocalFederation) -> bytes:
    return b"".join(p.read_bytes() for p in (local.root / "recorded").iterdir())


def is_at(out: Path, rounds: int) -> bool:
    """Whether the nodes have begun, and so many rounds are done."""
    return (out / "nodes.json").exists() and done_rounds(out) >= rounds


def done_rounds(out: Path) -> int:
    return RunFolder(out).count_rounds()


def wait_for(event: Callable[[], bool]) -> None:
    until = time.monotonic() + 120
    while not event():
        assert time.monotonic() < until
        time.sleep(0.02)
