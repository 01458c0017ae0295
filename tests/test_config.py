import itertools
import tomllib
from pathlib import Path

import pytest

from flowdup.config import load_config, merge, preset_names, read_config
from flowdup.errors import ConfigError
from flowdup.run.comparison import read_comparison
from flowdup.settings import to_toml

EXPERIMENTS = Path(__file__).parents[1] / "experiments"


def test_a_resolved_configuration_reads_back_as_itself() -> None:
    config = load_config("digits", ["seed=5", "data.rotations=[0, 180]", "data.path=a\\"])
    assert config.data.rotations == (0, 180)
    assert read_config(tomllib.loads(to_toml(config))) == config


@pytest.mark.parametrize(
    ("key", "near"),
    [
        ("server.rouns", "server.rounds"),
        ("sead", "seed"),
        ("client.optimiser.lr", "client.optimizer.lr"),
        ("method.regularisation", "method.regularization"),
        ("method.subspace.kk", "method.subspace.k"),
        ("lr", "client.optimizer.lr' or 'server.optimizer.lr"),
        ("server.lr", "server.optimizer.lr"),
        ("method.k", "method.subspace.k"),
        ("client.rounds", "server.rounds"),
        ("optimizer.lr", "client.optimizer' or 'server.optimizer"),
    ],
)
def test_an_unknown_key_is_answered_with_the_nearest_valid_one(key: str, near: str) -> None:
    with pytest.raises(ConfigError, match=f"unknown setting .*did you mean '{near}"):
        load_config("digits", [f"{key}=1"])


def test_settings_of_another_method_are_unknown() -> None:
    with pytest.raises(ConfigError, match=r"unknown setting 'method.regularization'"):
        read_config({"method": {"name": "fedavg", "regularization": 1.0}})


def test_choosing_another_method_drops_the_settings_of_the_first() -> None:
    config = load_config("digits", ["method.name=fedavg"])
    assert config.method.name == "fedavg"
    merged = merge({"method": {"name": "a", "x": 1}}, {"method": {"name": "a", "y": 2}})
    assert merged == {"method": {"name": "a", "x": 1, "y": 2}}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("server.rounds=many", "must be a int"),
        ("server.rounds=1.5", "must be a int"),
        ("server.replacement=1", "must be a bool"),
        ("data.rotations=90", "must be a list"),
        ("server=3", "must be a table"),
        ("server.rounds", "needs key=value"),
        ("method.name=flowdupp", "did you mean 'flowdup'"),
        ("data.labeled_fraction=true", "must be a float"),
    ],
)
def test_a_wrong_value_is_answered_with_what_is_wanted(text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_config("digits", [text])


@pytest.mark.parametrize(
    "text",
    [
        "method=flowdup",
        "method.name=[1]",
        "data.points=0",
        "data.validation_clients=-1",
        "data.classes_per_client=-2",
        "method.hypernetwork.hidden=0",
        "method.hypernetwork.embedding=-1",
        "method.hypernetwork.chunk=0",
        "method.hypernetwork.h1_lr_scale=-0.1",
        "method.regularization=-1.0",
        "method.regularization=nan",
        "method.reduction=max",
        "client.epochs=0",
        "client.optimizer.momentum=-3.0",
        "client.optimizer.beta1=2.0",
        "client.optimizer.eps=0.0",
        "client.optimizer.lr=inf",
        "server.lr_decay_fraction=2.0",
        "engine.clients_at_once=-1",
        "run.evaluate_every=0",
        "run.keep=first",
        "run.patience=-1",
        "server.averaging=1.0",
        "method.correction=me",
    ],
)
def test_a_senseless_value_is_refused_before_anything_runs(text: str) -> None:
    with pytest.raises(ConfigError):
        load_config("digits", [text])


@pytest.mark.parametrize("text", ["a\nb", 'quote " back \\ slash', "\x7f\x01", "größe/日本"])
def test_any_string_survives_in_toml(text: str) -> None:
    config = read_config({"data": {"path": text}})
    assert read_config(tomllib.loads(to_toml(config))).data.path == text


def test_whole_numbers_serve_as_floats() -> None:
    assert load_config("digits", ["server.alpha=1"]).server.alpha == 1.0


def test_every_preset_is_valid() -> None:
    for name in preset_names():
        try:
            load_config(name)
        except ConfigError as error:
            assert "flowdup compare" in str(error)
            assert read_comparison(name, Path("x"))


COMPARISONS = [f for f in sorted(EXPERIMENTS.glob("*.toml")) if "[compare]" in f.read_text()]


@pytest.mark.parametrize("file", COMPARISONS, ids=lambda file: file.stem)
def test_every_comparison_is_valid(file: Path) -> None:
    """Tables to reproduce are the campaign's to read."""
    assert read_comparison(str(file), Path("x"))


def test_unknown_presets_files_and_broken_toml_are_answered(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="did you mean 'digits'"):
        load_config("digit")
    with pytest.raises(ConfigError, match=r"cannot read nowhere\.toml"):
        load_config("nowhere.toml")
    broken = tmp_path / "broken.toml"
    broken.write_text("seed = = 1")
    with pytest.raises(ConfigError, match="not valid TOML"):
        load_config(str(broken))


@pytest.mark.parametrize(
    "text",
    [
        "x = " + "[" * 10_000,
        "x = " + "{a=" * 10_000,
        "seed = " + "9" * 400,
        "seed = " + "9" * 5_000,
        "seed = 0x" + "f" * 10_000,
        "[data]\nmean = [" + "9" * 400 + "]",
        "[data]\nrotations = [" + "9" * 400 + "]",
        "[client.optimizer]\nlr = " + "9" * 400,
        "server = 'x'",
        "server = [{}]",
        "method = 3",
        "[method]\nsubspace = 'x'",
        "[method.hypernetwork]\nhidden = {}",
        "[method.subspace]\nk = 1" + "0" * 19,
        "a" * 1_000_000 + " = 1",
        ".".join("a" * 100_000) + " = 1",
        "x = " + "1" * 2_000_000,
        "seed = 1979-05-27",
        '[data]\npath = "a\\u0000b"',
    ],
    ids=lambda text: text[:24].replace("\n", " "),
)
def test_a_hostile_file_of_settings_is_one_short_sentence(text: str, tmp_path: Path) -> None:
    path = tmp_path / "x.toml"
    path.write_text(text)
    with pytest.raises(ConfigError) as found:
        load_config(str(path))
    assert len(str(found.value)) < 600


@pytest.mark.parametrize(
    "text",
    [
        "a." * 5_000 + "b=1",
        "seed=" + "[" * 10_000,
        "seed=" + "9" * 5_000,
        "seed=0x" + "f" * 9_000,
        "seed=1e400",
        "data.path=a\udcffb",
        "data.mean=[1" + "0" * 400 + "]",
        "\x00=1",
        "method=" + "{a=" * 5_000,
        "m" * 100_000 + "=1",
        "model=" + "m" * 5_000,
        "client.optimizer.lr=1e39",
        "method.regularization=1e300",
        "client.optimizer.name=" + "m" * 5_000,
    ],
    ids=lambda text: ascii(text[:24]),
)
def test_a_hostile_setting_is_one_short_sentence(text: str) -> None:
    with pytest.raises(ConfigError) as found:
        load_config("digits", [text])
    assert len(str(found.value)) < 600


STAGED = """
seed = 3
[method]
name = "flowdup"
regularization = 0.5
[client]
batch_size = 7
[server]
rounds = 5
cohort = 9
[[before]]
method = {name = "fedavg"}
server = {rounds = 2}
[[before]]
method = {regularization = 0.1}
client = {epochs = 3}
"""


def test_a_stage_is_the_last_one_with_what_differs() -> None:
    config = read_config(tomllib.loads(STAGED))
    first, second, last = config.stages
    assert config.rounds == 2 + 5 + 5
    assert [s.method.name for s in config.stages] == ["fedavg", "flowdup", "flowdup"]
    assert (first.server.rounds, first.server.cohort, first.client.batch_size) == (2, 9, 7)
    assert (second.client.epochs, last.client.epochs) == (3, 1)
    assert (second.method.settings.regularization, last.method.settings.regularization) == (
        0.1,
        0.5,
    )
    assert all(s.seed == 3 and s.before == () for s in config.stages)


def test_stages_read_back_as_themselves() -> None:
    config = read_config(tomllib.loads(STAGED))
    assert read_config(tomllib.loads(to_toml(config))) == config


@pytest.mark.parametrize(
    ("before", "told"),
    [
        ({}, r"'before' must be a list of tables, \[\[before\]\] each"),
        ("fedavg", "'before' must be a list of tables"),
        ([3], r"\[\[before\]\] number 1: 'before' must be a table of settings, not 3"),
        ([{}, {"data": {}}], r"\[\[before\]\] number 2: unknown setting 'data'"),
        ([{"seed": 1}], r"number 1: unknown setting 'seed'"),
        ([{"before": []}], r"number 1: unknown setting 'before'"),
        ([{"server": {"rouns": 1}}], r"number 1: .*did you mean 'server.rounds'"),
        (
            [{}, {}, {"server": {"rounds": 0}}],
            r"number 3: setting 'server.rounds' must be at least 1",
        ),
        ([{"method": {"name": "fedavg", "regularization": 1.0}}], r"number 1: unknown setting 'me"),
        ([{"method": {"name": "fedavgg"}}], r"number 1: .*did you mean 'fedavg'"),
        ([{"client": 3}], r"number 1: 'client' must be a table of settings"),
        ([{"method": 3}], r"number 1: 'method' must be a table of settings"),
    ],
)
def test_a_senseless_stage_is_named(before: object, told: str) -> None:
    with pytest.raises(ConfigError, match=told) as found:
        read_config(tomllib.loads(STAGED) | {"before": before})
    assert len(str(found.value)) < 600


def test_the_settings_of_the_last_stages_method_do_not_carry_over_to_another() -> None:
    table = tomllib.loads(STAGED)
    table["method"] = {"name": "fedprox", "mu": 0.3}
    table["before"] = [{"method": {"name": "fedavg"}}, {"method": {"name": "fedprox"}}]
    first, second, _ = read_config(table).stages
    assert first.method.table().keys() == {"name", "correction", "init_scale"}
    assert second.method.settings.mu == 0.3


def test_one_setting_of_a_stage_can_be_changed_by_its_number(tmp_path: Path) -> None:
    (tmp_path / "base.toml").write_text(STAGED)
    over = tmp_path / "over.toml"
    over.write_text('base = "base.toml"\n[before.2.server]\nrounds = 4\n')
    texts = ["before.1.method.correction=em", "before.1.method.name=fedprox"]
    old, new = load_config(str(tmp_path / "base.toml")), load_config(str(over), texts)
    assert [s.server.rounds for s in old.stages] == [2, 5, 5]
    assert [s.server.rounds for s in new.stages] == [2, 4, 5]
    assert [s.method.name for s in new.stages] == ["fedprox", "flowdup", "flowdup"]
    assert [s.method.common.correction for s in new.stages] == ["em", "none", "none"]
    assert new.stages[1].client.epochs == 3 and new.stages[2:] == old.stages[2:]


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("before.0.server.rounds=1", "no stage 'before.0': use before.1, before.2"),
        ("before.3.server.rounds=1", "no stage 'before.3': use before.1"),
        ("before.x=1", "no stage 'before.x'"),
        ("before.1=1", "'before.1' must be a table of settings, not 1"),
        ("before.1.server.rouns=1", r"number 1: .*did you mean 'server.rounds'"),
    ],
)
def test_a_change_of_no_stage_is_refused(tmp_path: Path, text: str, told: str) -> None:
    (tmp_path / "base.toml").write_text(STAGED)
    with pytest.raises(ConfigError, match=told):
        load_config(str(tmp_path / "base.toml"), [text])


@pytest.mark.parametrize("texts", [[], ["before=[]"]])
def test_a_run_of_one_stage_has_none_to_change(texts: list[str]) -> None:
    with pytest.raises(ConfigError, match=r"'before\.1': none comes before"):
        load_config("digits", ["before.1.server.rounds=1", *texts])


def test_a_stage_that_is_changed_before_it_is_there_is_refused(tmp_path: Path) -> None:
    (tmp_path / "stages.toml").write_text(STAGED)
    (tmp_path / "changes.toml").write_text("[before.1.server]\nrounds = 4\n")
    for base, works in ((["stages", "changes"], True), (["changes", "stages"], False)):
        own = tmp_path / "own.toml"
        own.write_text(f"base = {[f'{name}.toml' for name in base]}\n")
        if works:
            assert load_config(str(own)).stages[0].server.rounds == 4
        else:
            with pytest.raises(ConfigError, match=r"'before.1' changes a stage before it is there"):
                load_config(str(own))


def test_stages_are_read_before_what_changes_them_in_whatever_order_they_are_given() -> None:
    texts = ["before.1.method.name=fedprox", "before=[{server={rounds=2}}]", "before.1.method.mu=3"]
    for order in itertools.permutations(texts):
        first, last = load_config("digits", order).stages
        assert (first.method.name, first.method.settings.mu, first.server.rounds) == (
            "fedprox",
            3,
            2,
        )
        assert last.method.name == "flowdup"


def test_a_stage_that_is_told_the_method_it_has_keeps_its_settings(tmp_path: Path) -> None:
    (tmp_path / "base.toml").write_text(STAGED)
    config = load_config(str(tmp_path / "base.toml"), ["before.2.method.name=flowdup"])
    assert config.stages[1].method.settings.regularization == 0.1


@pytest.mark.parametrize(
    ("texts", "told"),
    [
        (["method.name=fedavg"], "'fedavg-pseudo' still comes before"),
        (["method.name=fedavg", "server.rounds=3"], "set before = [] to leave that out"),
        (["method.name=fedavg", "before=[{}, {method={name='fedprox'}}]"], ""),
        (["method.name=fedavg", "before=[]"], ""),
        (["method.name=fedavg", "before.1.server.rounds=3"], ""),
        (["method.name=flowdup-plus"], ""),
        (["server.rounds=3"], ""),
    ],
)
def test_another_method_whose_stages_before_stay_is_told(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, texts: list[str], told: str
) -> None:
    load_config("digits-plus", texts)
    assert len(caplog.messages) == bool(told) and told in caplog.text


def test_a_file_whose_base_has_stages_is_told_that_they_stay(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    own = tmp_path / "own.toml"
    own.write_text('base = "plus"\nmethod.name = "fedavg"\nbefore = []\n')
    load_config(str(own))
    assert not caplog.messages
    own.write_text('base = "plus"\nmethod.name = "fedavg"\n')
    load_config(str(own), ["server.rounds=3"])
    (told,) = caplog.messages
    assert told.startswith("method.name = 'fedavg' is the last stage alone, and 'fedavg-pseudo'")


def test_a_methods_name_is_read_before_its_settings_in_whatever_order_they_are_given() -> None:
    texts = ["method.correction=em", "method.name=fedavg", "method.init_scale=0.5"]
    for order in itertools.permutations(texts):
        method = load_config("digits", order).method
        assert (method.name, method.common.correction, method.common.init_scale) == (
            "fedavg",
            "em",
            0.5,
        )
