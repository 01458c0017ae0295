"""`flowdup node`: which settings of a node are stored, and when."""

import time
from pathlib import Path

import pytest
from nearby import NearbyFederation

from flowdup.federation.kit import Kit
from flowdup.federation.local import LocalFederation
from flowdup.federation.processes import NodeSettings, read_node_settings, write_node_settings


@pytest.fixture
def kit(tmp_path: Path) -> Kit:
    """Of a node that has taken part."""
    made = Kit(NearbyFederation(tmp_path).folder.kit("north"), "north")
    write_node_settings(made, NodeSettings(tmp_path / "data" / "north", ("labels",), ("json",)))
    return made


def takes_part(local: LocalFederation, *words: str) -> None:
    """Start a node with these words and wait until it has its settings."""
    local.start("node", "node", *words)
    until = time.monotonic() + 120
    while "takes part with" not in local.output("node"):
        assert time.monotonic() < until and local.processes["node"].poll() is None
        time.sleep(0.2)


def test_settings_without_data_are_added_to_the_stored_ones(tmp_path: Path, kit: Kit) -> None:
    data = tmp_path / "data" / "north"
    with LocalFederation(tmp_path) as local:
        takes_part(local, str(kit.path), "--secure-sum", "--withhold", "clients")
        found = read_node_settings(kit)
    assert found == NodeSettings(data, ("labels", "clients"), ("json",), secure=True)


def test_settings_with_data_are_stored_anew(tmp_path: Path, kit: Kit) -> None:
    data = tmp_path / "data" / "south"
    with LocalFederation(tmp_path) as local:
        takes_part(local, str(kit.path), "--data", str(data), "--secure-sum")
        found = read_node_settings(kit)
    assert found == NodeSettings(data, secure=True)


@pytest.mark.parametrize(
    ("action", "told"), [("personalize", "has no psi yet"), ("train", "cannot 'train'")]
)
def test_a_node_that_does_not_take_part_stores_nothing(
    tmp_path: Path, kit: Kit, action: str, told: str
) -> None:
    before, data = kit.settings.read_bytes(), tmp_path / "data" / "south"
    words = ("node", str(kit.path), action, "--data", str(data))
    done = LocalFederation(tmp_path).command(*words)
    assert done.returncode and told in done.stderr
    assert kit.settings.read_bytes() == before
