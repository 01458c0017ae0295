"""Provisioning: kits are sealed, and a new node leaves the others' as they are."""

from pathlib import Path

import pytest

from flowdup.errors import ConfigError
from flowdup.federation.folder import FederationFolder, FederationNames
from flowdup.federation.kit import open_kit
from flowdup.federation.provision import add_node, init_federation


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> FederationFolder:
    made = FederationFolder(tmp_path_factory.mktemp("kits") / "federation")
    init_federation(made, FederationNames("localhost", 8002, ("north", "south")))
    return made


def contents(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


def test_a_new_node_gets_a_kit_and_nobody_elses_changes(folder: FederationFolder) -> None:
    before = contents(folder.kit("north")) | contents(folder.coordinator)
    assert open_kit(add_node(folder, "east")).node == "east"
    assert contents(folder.kit("north")) | contents(folder.coordinator) == before
    assert folder.read_names().nodes == ("north", "south", "east")
    roots = {(folder.kit(n) / "startup" / "rootCA.pem").read_bytes() for n in ("north", "east")}
    assert len(roots) == 1
    with pytest.raises(ConfigError, match="two nodes named 'north'"):
        add_node(folder, "north")


def test_private_keys_are_for_their_owner_alone(folder: FederationFolder) -> None:
    for key in folder.path.rglob("*.key"):
        assert key.stat().st_mode & 0o077 == 0
    assert folder.authority.stat().st_mode & 0o077 == 0


def test_jobs_are_not_kept_among_temporary_files(folder: FederationFolder) -> None:
    local = folder.coordinator / "local" / "resources.json"
    assert "/tmp/nvflare" not in local.read_text()
    assert str(folder.coordinator.resolve() / "store") in local.read_text()


@pytest.mark.parametrize(
    ("name", "text", "told"),
    [
        ("startup/fed_client.json", "{}", "was changed"),
        ("local/custom/sitecustomize.py", "print()", "does not belong to the kit"),
        ("local/authorization.json", None, "is missing"),
        ("kit.json", '{"node": "south", "files": {}, "signature": "AAAA"}', "was changed"),
        ("kit.json", "{}", "is no kit"),
    ],
)
def test_a_tampered_kit_is_refused(
    folder: FederationFolder, name: str, text: str | None, told: str
) -> None:
    kit = folder.kit("south")
    path = kit / name
    before = path.read_bytes() if path.exists() else None
    try:
        if text is None:
            path.unlink()
        else:
            path.parent.mkdir(exist_ok=True)
            path.write_text(text)
        with pytest.raises(ConfigError, match=told):
            open_kit(kit)
    finally:
        if before is None:
            path.unlink()
        else:
            path.write_bytes(before)
    assert open_kit(kit).node == "south"


@pytest.mark.parametrize("name", ["", "Nörth", "a/b", "localhost", "x" * 60, "-a"])
def test_odd_names_of_nodes_are_refused(tmp_path: Path, name: str) -> None:
    names = FederationNames("localhost", 8002, (name,))
    with pytest.raises(ConfigError, match="cannot be named"):
        init_federation(FederationFolder(tmp_path / "f"), names)
