"""The list of settings is the dataclasses: nothing is missing, and nothing is made up."""

from dataclasses import dataclass

import pytest

from flowdup.config import Config, override, read_config
from flowdup.errors import ConfigError
from flowdup.methods import METHODS, register_method
from flowdup.methods.fedavg import FedAvg
from flowdup.setting_list import field_comments, list_settings
from flowdup.settings import plain, setting_paths


@dataclass(frozen=True)
class OwnConfig:
    width: int = 3  # of the first layer,
    # in metres
    bare: float = 0.5

    # a heading, not a meaning
    text: str = "a # b"  # has no comment inside


@dataclass(frozen=True)
class OtherConfig(OwnConfig):
    bare: float = 0.7  # known now


class Own(FedAvg):
    """A method for this test."""


def test_every_setting_has_a_meaning() -> None:
    without = [setting.key for setting in list_settings() if not setting.meaning]
    assert not without


def test_the_list_has_every_key_that_can_be_set_and_no_other() -> None:
    found = {setting.key for setting in list_settings()}
    assert found == {*setting_paths(Config, ""), "method.name"}
    assert len(found) > 80


def test_a_default_in_the_list_is_the_default() -> None:
    """Written into a file of settings as it is listed, it changes nothing."""
    default = Config()
    for setting in list_settings():
        for name in setting.methods or ("flowdup",):
            table = {"method": {"name": name}}
            changed = override(table, f"{setting.key}={setting.default}")
            assert read_config(changed) == read_config(table), setting
    assert plain(default)["server"]["rounds"] == int(list_settings("server.rounds")[0].default)


def test_a_meaning_is_the_comment_behind_a_field_and_the_lines_right_below() -> None:
    own = {"width": "of the first layer, in metres", "text": "has no comment inside"}
    assert field_comments(OwnConfig) == own
    assert field_comments(OtherConfig) == own | {"bare": "known now"}


def test_settings_of_a_method_name_the_methods_that_have_them_so() -> None:
    register_method("own", Own, OwnConfig)
    try:
        rows = list_settings("method.width")
        assert [(row.key, row.default, row.methods) for row in rows] == [
            ("method.width", "3", ("own",))
        ]
    finally:
        METHODS.unregister("own")
    pooling = {row.default: row.methods for row in list_settings("method.hypernetwork.pooling")}
    assert pooling['"mean-std"'] == ("flowdup-plus",) and "flowdup" in pooling['"mean"']


def test_a_prefix_is_whole_parts_of_a_key() -> None:
    assert {row.key.split(".")[0] for row in list_settings("server")} == {"server"}
    assert [row.key for row in list_settings("server.optimizer.lr")] == ["server.optimizer.lr"]
    assert list_settings("server.optimizer.") == list_settings("server.optimizer")
    with pytest.raises(ConfigError, match="did you mean 'server'"):
        list_settings("serv")
    with pytest.raises(ConfigError, match=r"did you mean 'server\.optimizer\.lr'"):
        list_settings("server.optimizer.lrr")
