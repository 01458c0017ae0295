"""Secure sums across nodes: the coordinator gets the mean, and no node's update."""

import json
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey
from nearby import TABLE, NearbyFederation, Stub
from nvflare.collab import CollabCallError

from flowdup.checkpoint import load_checkpoint
from flowdup.config import read_config
from flowdup.errors import ConfigError, FederationError, MessageError
from flowdup.federation.record import NodeRecord, read_rounds
from flowdup.federation.secure_keys import SumTerms, check_keys, sign_keys
from flowdup.federation.settings import FederationSettings, check_federation
from flowdup.messages import Task
from flowdup.methods import Params
from flowdup.params import pack
from flowdup.run.simulation import Simulation
from flowdup.secure_sum import FixedPoint, PublicKeys
from flowdup.server import sample_cohort

NODES = ("north", "south", "west", "east")
FIXED = FixedPoint(8.0, 12)
SECURE: dict[str, Any] = {"secure": True, "encoding": "plain"}


def table(rounds: int = 4) -> dict[str, Any]:
    server = {
        "rounds": rounds,
        "cohort": 12,
        "alpha": 1 / 3,
        "replacement": False,
        "optimizer": {"name": "sgd", "lr": 1.0},
    }
    return TABLE | {
        "server": server,
        "data": TABLE["data"] | {"train_clients": 12, "validation_clients": 4},
    }


def federation(root: Path, rounds: int = 4) -> NearbyFederation:
    return NearbyFederation(root, table(rounds), NODES)


def psi(near: NearbyFederation) -> Params:
    return load_checkpoint(near.run / "checkpoint")[1].psi


def apart(a: Params, b: Params) -> float:
    return max(float((a[n] - b[n]).abs().max()) for n in a)


def leaves(stub: Stub, call: str, after: int = 0) -> None:
    """The node is gone when it is called so for the next time after so many."""
    seen: list[str] = []

    def change(name: str, answer: Any) -> Any:
        seen.append(name)
        if seen.count(call) > after:
            raise CollabCallError("node", name, "killed")
        return answer

    stub.change = change


def test_the_sum_is_the_plain_mean_to_the_rounding(tmp_path: Path) -> None:
    plain, secure = federation(tmp_path / "plain", 1), federation(tmp_path / "secure", 1)
    assert plain.train(plain.nodes(), encoding="plain") == "finished"
    assert secure.train(secure.nodes(), **SECURE) == "finished"
    assert 0 < apart(psi(plain), psi(secure)) < FIXED.step / 2 + 1e-7  # and float32's own
    (row,) = read_rounds(secure.run)
    assert row["clients"] == 12 and row["answered"] == sorted(NODES)
    rows = [json.loads((near.run / "metrics.jsonl").read_text()) for near in (plain, secure)]
    assert rows[0]["loss"] == pytest.approx(rows[1]["loss"], abs=1e-5)


def sent(stubs: list[Stub]) -> bytes:
    """All that passed between nodes and coordinator."""

    def contents(value: Any) -> Iterator[bytes]:
        if isinstance(value, bytes):
            yield value
        for inner in value.values() if isinstance(value, dict) else value:
            if isinstance(inner, bytes | dict | list | tuple):
                yield from [inner] if isinstance(inner, bytes) else contents(inner)

    return b"".join(
        part for stub in stubs for call in stub.calls for part in contents([call[1], call[2]])
    )


def updates(near: NearbyFederation) -> dict[str, bytes]:
    """A piece of each client's update in the first round, and of each node's sum of them, in the
    forms in which they could be sent.
    """
    one_by_one = replace(near.config.engine, name="sequential")
    simulation = Simulation(replace(near.config, engine=one_by_one), near.population)
    state, server = simulation.initial_state(), near.config.server
    stream = simulation.stream.child("cohort", 1)
    chosen = sample_cohort(server, simulation.engine.roster, True, stream)
    found: dict[str, bytes] = {}
    sums: dict[int, torch.Tensor] = {}
    task = Task(1, state.psi, {}, dict(enumerate(chosen)))
    with simulation.cores():
        replies = list(simulation.engine.train(task))
    for client, reply in zip(chosen, replies, strict=True):
        whole = reply.whole_delta()
        vector = pack({n: whole[n] for n in state.psi})
        sums[client // 3] = sums.get(client // 3, 0) + vector.double()
        found |= _pieces(f"of client {client}", vector)
    for node, vector in sums.items():
        found |= _pieces(f"of all clients of node {node}", vector.float())
    return found


def _pieces(whose: str, vector: torch.Tensor) -> dict[str, bytes]:
    """Sixteen numbers from the largest on, as they are and with a fixed point."""
    first = min(int(vector.abs().argmax()), len(vector) - 16)
    piece = vector[first : first + 16]
    coded = FIXED.encode(piece.double().numpy())
    return {f"update {whose}": piece.numpy().tobytes(), f"integers {whose}": coded.tobytes()}


def test_no_update_of_a_client_or_a_node_is_in_a_message(tmp_path: Path) -> None:
    plain, secure = federation(tmp_path / "plain", 1), federation(tmp_path / "secure", 1)
    pieces = updates(plain)
    stubs = plain.nodes()
    plain.train(stubs, encoding="plain")
    recorded = sent(stubs)
    seen = [what for what, piece in pieces.items() if piece in recorded]
    assert sorted(seen) == sorted(f"update of client {n}" for n in range(12))  # they are found
    stubs = secure.nodes()
    secure.train(stubs, **SECURE)
    recorded = sent(stubs)
    assert len(recorded) > 4 * 4 * pack(psi(secure)).numel()  # of four nodes, the masked sums
    assert not [what for what, piece in pieces.items() if piece in recorded]


def test_a_node_that_is_killed_while_it_trains_is_recovered_from(tmp_path: Path) -> None:
    plain, secure = federation(tmp_path / "plain", 3), federation(tmp_path / "secure", 3)
    for near, call, how in (
        (plain, "train", {"encoding": "plain"}),
        (secure, "secure_mask", SECURE),
    ):
        stubs = near.nodes()
        leaves(stubs[1], call, after=2)
        assert near.train(stubs, **how) == "finished"
        assert [*read_rounds(near.run)[2]["missing"]] == ["south"]
    assert apart(psi(plain), psi(secure)) < 1e-5


def test_a_node_that_is_killed_after_it_has_sent_its_sum_is_in_the_mean(tmp_path: Path) -> None:
    plain, secure = federation(tmp_path / "plain", 1), federation(tmp_path / "secure", 1)
    plain.train(plain.nodes(), encoding="plain")
    stubs = secure.nodes()
    leaves(stubs[2], "secure_reveal")
    secure.train(stubs, **SECURE)
    assert apart(psi(plain), psi(secure)) < FIXED.step / 2 + 1e-7


def test_a_sum_of_fewer_than_three_nodes_is_not_made(tmp_path: Path) -> None:
    near = federation(tmp_path)
    stubs = near.nodes()
    for stub in stubs[1:3]:
        leaves(stub, "secure_mask", after=1)
    with pytest.raises(FederationError, match="2 nodes stayed in the secure sum and 3"):
        near.train(stubs, **SECURE)
    assert load_checkpoint(near.run / "checkpoint")[1].round == 1
    assert near.train(near.nodes(), **SECURE) == "finished"  # it goes on with all


def test_a_cohort_at_fewer_than_three_nodes_is_summed_with_others(tmp_path: Path) -> None:
    more = {"cohort": 4, "replacement": True, "optimizer": {"name": "sgd", "lr": 1.0}}
    own = TABLE | {"server": TABLE["server"] | more}
    plain = NearbyFederation(tmp_path / "plain", own)
    secure = NearbyFederation(tmp_path / "secure", own)
    assert plain.train(plain.nodes(), encoding="plain") == "finished"
    assert secure.train(secure.nodes(), **SECURE) == "finished"
    assert min(len(row["asked"]) for row in read_rounds(plain.run)) < 3
    for row in read_rounds(secure.run):
        assert len(row["asked"]) == len(row["answered"]) == 3 and row["clients"] == 4
    assert apart(psi(plain), psi(secure)) < 1e-5
    assert "holds updates of 2 alone" in secure.folder.log.read_text()


def test_a_secure_sum_waits_for_three_nodes(tmp_path: Path) -> None:
    near = NearbyFederation(tmp_path)
    with pytest.raises(FederationError, match="2 nodes are there, a secure sum is of 3 or more"):
        near.train(near.nodes("north", "south"), **SECURE)
    assert near.train(near.nodes(), **SECURE) == "finished"


@pytest.mark.parametrize("key", ["signature", "masks", "certificate"])
def test_keys_that_are_not_signed_are_refused(tmp_path: Path, key: str) -> None:
    near = federation(tmp_path, 1)
    stubs = near.nodes()
    others = (near.folder.kit("north") / "startup" / "client.crt").read_bytes()

    def spoil(name: str, answer: Any) -> Any:
        if name == "secure_keys":
            content = answer["content"]
            bad = others if key == "certificate" else bytes(32)
            return {"content": content | {key: bad}}
        return answer

    stubs[3].change = spoil
    assert near.train(stubs, **SECURE) == "finished"
    (refusal,) = NodeRecord(near.folder).refusals("east")
    assert "not signed with its certificate" in refusal["reason"]
    assert read_rounds(near.run)[0]["answered"] == ["north", "south", "west"]


def tells(stub: Stub, near: NearbyFederation, keys: PublicKeys) -> None:
    """The node tells these keys, signed as it should."""

    def change(name: str, answer: Any) -> Any:
        if name != "secure_keys" or stub.node.sum is None:
            return answer
        kit = near.folder.kit(stub.name)
        return {"content": sign_keys(kit, stub.name, stub.node.sum.terms, keys)}

    stub.change = change


def public_key() -> bytes:
    return X25519PrivateKey.generate().public_key().public_bytes_raw()


SAME = public_key()


@pytest.mark.parametrize(
    "keys",
    [
        PublicKeys(bytes(32), public_key()),  # with which no secret can be agreed on
        PublicKeys(public_key(), bytes(32)),
        PublicKeys(public_key()[1:], public_key()),
        PublicKeys(SAME, SAME),
    ],
)
def test_who_tells_keys_that_cannot_be_used_is_refused_and_nobody_else(
    tmp_path: Path, keys: PublicKeys
) -> None:
    near = federation(tmp_path, 1)
    stubs = near.nodes()
    tells(stubs[3], near, keys)
    assert near.train(stubs, **SECURE) == "finished"
    (row,) = read_rounds(near.run)
    assert [*row["refused"]] == ["east"] and not row["missing"]
    assert row["answered"] == ["north", "south", "west"]


def test_nodes_that_tell_the_same_key_are_refused_and_nobody_else(tmp_path: Path) -> None:
    near = federation(tmp_path, 1)
    stubs = near.nodes()
    for stub in stubs[2:]:
        tells(stub, near, PublicKeys(SAME, public_key()))
    with pytest.raises(FederationError, match="2 nodes stayed in the secure sum and 3"):
        near.train(stubs, **SECURE)
    (row,) = read_rounds(near.run)
    assert {*row["refused"]} == {"west", "east"} and not row["missing"]


def test_a_node_checks_the_others_keys_itself(tmp_path: Path) -> None:
    near, other = federation(tmp_path / "one", 1), federation(tmp_path / "two", 1)
    foreign = NearbyFederation(tmp_path / "three", TABLE)  # another authority, the same names
    terms, keys = SumTerms(1, NODES, 12, 8.0, "a"), PublicKeys(b"m" * 32, b"s" * 32)
    kit = near.folder.kit("north")
    signed = sign_keys(other.folder.kit("south"), "south", terms, keys)
    assert check_keys(kit, "south", terms, signed) == keys
    for node, at, made in (
        ("west", terms, signed),  # of another node
        ("south", SumTerms(2, NODES, 12, 8.0, "a"), signed),  # of another sum
        ("south", terms, sign_keys(foreign.folder.kit("south"), "south", terms, keys)),
        ("south", terms, signed | {"seals": b"t" * 32}),  # the coordinator's own
        ("south", terms, {}),
    ):
        with pytest.raises(MessageError):
            check_keys(kit, node, at, made)
    for own in (near.folder.admin, near.folder.viewer, near.folder.coordinator):
        node, signer = own.name, tmp_path / own.name  # of the same authority, and no node's
        if own == near.folder.coordinator:
            node = near.folder.read_names().host
        shutil.copytree(own / "startup", signer / "startup")
        for file in (signer / "startup").glob("server.*"):
            file.rename(file.with_stem("client"))
        at = SumTerms(1, (*NODES, node), 12, 8.0, "a")
        with pytest.raises(MessageError, match="not signed with its certificate"):
            check_keys(kit, node, at, sign_keys(signer, node, at, keys))


def test_a_node_may_send_secure_sums_alone(tmp_path: Path) -> None:
    near = federation(tmp_path, 1)
    stubs = [*near.nodes("north"), *near.nodes(*NODES[1:], secure=True)]
    assert near.train(stubs, encoding="plain") == "finished"
    (row,) = read_rounds(near.run)
    assert row["answered"] == ["north"] and {*row["missing"]} == {*NODES[1:]}
    answers = [answer for stub in stubs[1:] for name, _, answer in stub.calls if name == "train"]
    assert answers == [{"error": "MessageError"}] * 3
    near = federation(tmp_path / "secure", 1)
    assert near.train(near.nodes(secure=True), **SECURE) == "finished"
    assert len(read_rounds(near.run)[0]["answered"]) == 4


@pytest.mark.parametrize(
    ("server", "settings", "told"),
    [
        ({"aggregation": {"name": "median"}}, {}, "server.aggregation"),
        ({"aggregation": {"norm_bound": 1.0}}, {}, "server.aggregation"),
        ({}, {"encoding": "factors"}, "--encoding plain"),
        ({}, {"encoding": "int8"}, "--encoding plain"),
        ({}, {"number_bound": 0.0}, "--number-bound"),
    ],
)
def test_what_must_see_single_updates_is_refused(
    server: dict[str, Any], settings: dict[str, Any], told: str
) -> None:
    config = read_config(TABLE | {"server": TABLE["server"] | server})
    check_federation(read_config(TABLE), FederationSettings(**SECURE))
    with pytest.raises(ConfigError, match=told):
        check_federation(config, FederationSettings(**(SECURE | settings)))
