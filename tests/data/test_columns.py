"""Inputs of a table are known by the names of their columns, in whatever order these come."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.csv
import pyarrow.parquet
import pytest
import torch
from commands.here import flowdup
from crafted import seal

from flowdup import load, load_config, load_model, read_config, train_run
from flowdup.data import DataConfig, InputSpec, load_population
from flowdup.data.user_data import read_inputs, read_table
from flowdup.errors import ConfigError, DataError
from flowdup.federation.inputs import find_inputs
from flowdup.random import Stream
from flowdup.run.start import load_start

INPUTS = ("temp", "hum", "press", "volt")
KEPT = ("user", "activity")


def table(path: Path, columns: Sequence[str], clients: Sequence[int] = range(8)) -> Path:
    """Rows of some clients, the same in any order of the columns; only temp tells the class."""
    rows = [",".join(columns)]
    for client in clients:
        draw = np.random.default_rng(client)
        for point in range(12):
            x = [(5.0, -5.0)[point % 2], *(0.1, 3.0, 40.0) * draw.normal(size=3)]
            row = dict(zip(INPUTS, map("{:.3f}".format, x), strict=True))
            row |= {"user": f"u{client}", "activity": ("run", "walk")[point % 2]}
            rows.append(",".join(row[name] for name in columns))
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join(rows) + "\n")
    return path


def settings(path: Path, **data: Any) -> dict[str, Any]:
    columns = {"client_column": "user", "label_column": "activity"}
    held = {"validation_clients": 2, "test_clients": 2}
    return {
        "model": "mlp",
        "method": {"name": "fedavg"},
        "client": {"optimizer": {"lr": 0.1}},
        "server": {"rounds": 20, "cohort": 4, "optimizer": {"lr": 0.03}},
        "engine": {"device": "cpu"},
        "data": {"source": "table", "path": str(path), **columns, **held} | data,
    }


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run, the table that it was trained on, and tables of the same rows."""
    folder = tmp_path_factory.mktemp("columns")
    path = table(folder / "all.csv", (*KEPT, *INPUTS))
    table(folder / "turned.csv", (*INPUTS[::-1], *KEPT[::-1]))
    table(folder / "one.csv", INPUTS, [3])
    table(folder / "one-turned.csv", INPUTS[::-1], [3])
    table(folder / "one-labeled.csv", ("activity", *INPUTS[::-1], "user"), [3])
    table(folder / "lacking.csv", (*KEPT, *INPUTS[:3]))
    table(folder / "renamed.csv", INPUTS).write_text("temp,hum,press,power\n1,2,3,4\n")
    list(train_run(read_config(settings(path)), folder / "run"))
    return folder


def accuracy(*words: str | Path) -> float:
    ended = flowdup("evaluate", *words, "--json")
    assert ended.code == 0, ended.error
    return float(json.loads(ended.out)["metrics"]["held_out"]["accuracy"]["mean"])


def test_names_of_columns_travel_to_the_model_file(home: Path, tmp_path: Path) -> None:
    federation = load(home / "run")
    assert federation.spec.inputs.columns == INPUTS
    federation.personalize(read_inputs(home / "one.csv")).save(tmp_path / "me.safetensors")
    assert load_model(tmp_path / "me.safetensors").inputs.columns == INPUTS


def test_other_clients_are_evaluated_by_name(home: Path) -> None:
    right = accuracy(home / "run", "--input", home / "all.csv")
    assert right > 90
    assert accuracy(home / "run", "--input", home / "turned.csv") == right
    other = f"data.path='{home / 'turned.csv'}'"
    assert accuracy(home / "run", "--set", other) == accuracy(home / "run")


@pytest.mark.parametrize("file", ["one-turned.csv", "one-labeled.csv"])
def test_one_client_has_the_same_model_and_answers_in_any_order(
    home: Path, tmp_path: Path, file: str
) -> None:
    said = []
    for number, source in enumerate((home / "one.csv", home / file)):
        model = tmp_path / f"{number}.safetensors"
        ended = flowdup("personalize", home / "run", "--input", source, "--out", model)
        assert ended.code == 0, ended.error
        said.append(flowdup("predict", model, "--input", source).out)
    assert said[0] == said[1] and "run" in said[0] and "walk" in said[0]
    one, other = (load_model(tmp_path / f"{number}.safetensors").state_dict() for number in (0, 1))
    assert all(torch.equal(one[name], other[name]) for name in one)


def test_the_table_of_training_is_read_by_the_names_in_the_settings(tmp_path: Path) -> None:
    path = table(tmp_path / "all.csv", (*KEPT, *INPUTS))
    chosen = settings(path, input_columns=["press", "temp"])
    list(train_run(read_config(chosen), tmp_path / "run"))
    assert load(tmp_path / "run").spec.inputs.columns == ("press", "temp")
    model = tmp_path / "me.safetensors"
    ended = flowdup("personalize", tmp_path / "run", "--input", path, "--out", model)
    assert ended.code == 0, ended.error
    assert len(flowdup("predict", model, "--input", path).out.splitlines()) == 96


@pytest.mark.parametrize("kind", ["csv", "parquet"])
def test_a_column_of_numbers_called_x_is_one_of_several(tmp_path: Path, kind: str) -> None:
    path = tmp_path / f"axes.{kind}"
    axes = {"user": ["a", "a", "b"], "x": [1.0, 2.0, 3.0], "y": [4, 5, 6], "activity": [0, 1, 0]}
    write = pyarrow.csv.write_csv if kind == "csv" else pyarrow.parquet.write_table
    write(pyarrow.table(axes), path)
    found = read_table(path, *KEPT, ("x",))
    assert found.columns == ("x", "y")
    assert found["all"][0].x.tolist() == [[1, 4], [2, 5]]


def test_rows_without_a_client_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "all.csv"
    path.write_text("user,volt,activity\na,1.5,0\n,2.5,1\n")
    with pytest.raises(DataError, match="is empty in some rows: give every row a client"):
        read_table(path, *KEPT, ("x",))


def test_one_client_of_a_table_is_read_by_its_name(home: Path, tmp_path: Path) -> None:
    table, own = home / "all.csv", tmp_path / "own.csv"
    head, *rows = table.read_text().splitlines()
    own.write_text("\n".join([head, *(row for row in rows if row.startswith("u3,"))]))
    models = [tmp_path / f"{number}.safetensors" for number in range(3)]
    choices = ((table, "--client", "u3"), (own,), (table,))
    ended = [  # from the folder that is deployed, without settings
        flowdup("personalize", home / "run/best", "--json", "--out", model, "--input", *choice)
        for model, choice in zip(models, choices, strict=True)
    ]
    assert [json.loads(e.out)["points"] for e in ended] == [12, 12, 96]
    assert ["one model is made of all of them" in e.error for e in ended] == [False, False, True]
    nobody = (table, "--client", "nobody", "--out", tmp_path / "no.safetensors")
    refused = flowdup("personalize", home / "run", "--input", *nobody)
    assert refused.code and "no row whose column 'user' is 'nobody'" in refused.error
    first = next(number for number, row in enumerate(rows) if row.startswith("u3,"))
    gap = tmp_path / "gap.csv"
    gap.write_text("\n".join([head, *rows[: first + 2], "u3" + "," * head.count(","), *rows]))
    words = (gap, "--client", "u3", "--out", tmp_path / "no.safetensors")
    refused = flowdup("personalize", home / "run", "--input", *words)
    assert "gap.csv, rows of client 'u3', has nulls, the first in row 2 (co" in refused.error


def test_a_model_is_not_written_over_the_data_that_it_is_made_of(
    home: Path, tmp_path: Path
) -> None:
    own, link = tmp_path / "own.csv", tmp_path / "link.csv"
    own.write_bytes((home / "one.csv").read_bytes())
    link.symlink_to(own)
    for out in (own, link):
        ended = flowdup("personalize", home / "run", "--input", own, "--out", out)
        assert ended.code and "has the client's data" in ended.error
    assert own.read_bytes() == (home / "one.csv").read_bytes()


def test_a_column_that_is_not_there_is_named(home: Path, tmp_path: Path) -> None:
    model = tmp_path / "me.safetensors"
    load(home / "run").personalize(read_inputs(home / "one.csv")).save(model)
    for file in ("lacking.csv", "renamed.csv"):
        for words in (
            ("evaluate", home / "run"),
            ("personalize", home / "run", "--out", tmp_path / "no.safetensors"),
            ("predict", model),
        ):
            code, _, error = flowdup(*words, "--input", home / file)
            assert code and "has no column 'volt'" in error


def test_columns_that_a_person_names_go_before_those_of_the_run(home: Path, tmp_path: Path) -> None:
    path = tmp_path / "other.csv"
    path.write_text((home / "all.csv").read_text().replace("temp", "celsius", 1))
    named = f"data.input_columns={['celsius', *INPUTS[1:]]}"
    right = accuracy(home / "run", "--input", home / "all.csv")
    assert accuracy(home / "run", "--input", path, "--set", named) == right


def test_groups_of_a_table_are_read_by_the_columns_of_the_first(tmp_path: Path) -> None:
    table(tmp_path / "train" / "1.csv", (*KEPT, *INPUTS), range(4))
    table(tmp_path / "test" / "1.csv", (*INPUTS[::-1], *KEPT), range(4, 6))
    found = read_table(tmp_path, *KEPT, ("x",))
    assert found.columns == INPUTS
    assert {*found["test"][0].x[:, 0].tolist()} == {5.0, -5.0}
    table(tmp_path / "test" / "1.csv", (*INPUTS[:3], *KEPT), range(4, 6))
    with pytest.raises(DataError, match="test has no column 'volt'"):
        read_table(tmp_path, *KEPT, ("x",))


def test_columns_of_parquet_and_of_clients_own_files_have_names_and_lists_have_none(
    tmp_path: Path,
) -> None:
    rows = pyarrow.csv.read_csv(table(tmp_path / "all.csv", (*KEPT, *INPUTS)))
    pyarrow.parquet.write_table(rows, tmp_path / "all.parquet")
    assert read_table(tmp_path / "all.parquet", *KEPT, ["volt", "temp"]).columns == ("volt", "temp")
    lists = rows.append_column("x", [[[1.0, 2.0]] * len(rows)])
    pyarrow.parquet.write_table(lists, tmp_path / "lists.parquet")
    assert read_table(tmp_path / "lists.parquet", *KEPT, ("x",)).columns == ()
    for client in range(5):
        table(tmp_path / "own" / f"{client}.csv", (*INPUTS, "activity"), [client])
    config = DataConfig(
        "folder", 0, 1, 1, path=str(tmp_path / "own"), label_column="activity", shape=(1, 2, 2)
    )
    assert load_population(config, Stream(0)).spec.columns == INPUTS


def without_columns(run: Path) -> None:
    """Make of a run what it was before columns had names."""
    for header in run.glob("*/checkpoint.json"):
        content = json.loads(header.read_bytes())
        del content["federation"]["inputs"]["columns"]
        header.write_bytes(seal(content))


def test_a_checkpoint_from_before_names_of_columns_loads_and_trains_on(tmp_path: Path) -> None:
    path = table(tmp_path / "all.csv", (*KEPT, *INPUTS))
    list(train_run(read_config(settings(path)), tmp_path / "run"))
    without_columns(tmp_path / "run")
    assert load(tmp_path / "run").spec.inputs.columns == ()
    assert read_inputs(tmp_path / "all.csv", (4,)).shape == (96, 4)
    longer = settings(path)
    longer["server"]["rounds"] += 1
    list(train_run(read_config(longer), tmp_path / "run", resume=True))
    assert load(tmp_path / "run" / "checkpoint").spec.inputs.columns == INPUTS


def test_a_run_starts_from_no_model_of_other_columns(home: Path) -> None:
    spec = load(home / "run").spec.inputs
    other = InputSpec(
        spec.shape, spec.dtype, spec.classes, spec.mean, spec.std, spec.class_names, INPUTS[::-1]
    )
    with pytest.raises(ConfigError, match="its columns is"):
        load_start(home / "run", "mlp", other)
    unnamed = InputSpec(spec.shape, spec.dtype, spec.classes, spec.mean, spec.std)
    assert load_start(home / "run", "mlp", unnamed)


@pytest.mark.parametrize("columns", [INPUTS[:3], (*INPUTS[:3], 7), "abcd", 7, None], ids=str)
def test_what_cannot_name_the_columns_is_one_sentence(columns: Any) -> None:
    with pytest.raises(DataError, match=": give"):
        InputSpec((4,), "float32", 2, columns=columns)
    assert InputSpec((2, 2), "float32", 2, columns=INPUTS).columns == INPUTS


class Nodes:
    """Nodes that tell these columns."""

    def __init__(self, *columns: Sequence[str]) -> None:
        self.alive = [f"node-{number}" for number in range(len(columns))]
        self.columns = columns

    def call(self, name: str, requests: dict[str, Any]) -> dict[str, Any]:
        inputs = {"shape": [4], "dtype": "float32", "classes": 2, "class_names": []}
        sums = {"count": 9, "total": [1.0] * 4, "squares": [1.0] * 4}
        answers = [inputs | sums | {"columns": list(own)} for own in self.columns]
        return dict(zip(requests, answers, strict=True))


def test_nodes_whose_columns_come_in_another_order_are_refused(tmp_path: Path) -> None:
    config: Any = read_config(settings(Path("data")))
    mixed: Any = Nodes((), INPUTS, INPUTS)
    assert find_inputs(config, tmp_path, mixed).columns == INPUTS
    (tmp_path / "other").mkdir()
    other: Any = Nodes(INPUTS, INPUTS[::-1])
    with pytest.raises(DataError, match="node-0 have the columns"):
        find_inputs(config, tmp_path / "other", other)


def test_init_says_how_to_name_columns(home: Path, tmp_path: Path) -> None:
    code, _, error = flowdup("init", home / "all.csv", "--out", tmp_path / "all.toml")
    assert code and "has no column 'client'" in error
    for key in ("client", "label", "input"):
        assert f"data.{key}_column" in error


def test_init_reads_the_columns_that_it_is_told_and_so_does_its_file(tmp_path: Path) -> None:
    path = table(tmp_path / "all.csv", (*KEPT, *INPUTS))
    columns = ["--set", "data.client_column=user", "--set", "data.label_column=activity"]
    inputs = ["--set", 'data.input_columns=["volt", "temp"]']
    out = ["--out", str(tmp_path / "own.toml")]
    assert "no column 'client'" in flowdup("init", path, *out).error
    ended = flowdup("init", path, *columns, *inputs, *out)
    assert ended.code == 0 and "8 clients, 8 with labels" in ended.out
    config = load_config(str(tmp_path / "own.toml"))
    assert config.data.class_names == () and config.data.classes == 0
    population = load_population(config.data, Stream(0))
    assert population.spec.columns == ("volt", "temp")
    assert population.spec.class_names == ("run", "walk")


@pytest.mark.parametrize(
    ("setting", "told"),
    [
        ("data.points=3", "'data.points' cannot be set here"),
        ("server.rounds=3", "'server' cannot be set here"),
        ("data.label_colum=kind", "did you mean 'data.label_column'?"),
        ("label_column=kind", "did you mean 'data.label_column'?"),
        ("data.label_column=3", "data.label_column"),
        ("data.label_column=nothing", "has no column 'nothing'"),
        ("label_column", "--set needs key=value"),
    ],
)
def test_init_refuses_settings_that_do_not_say_how_to_read(
    tmp_path: Path, setting: str, told: str
) -> None:
    path = table(tmp_path / "all.csv", (*KEPT, *INPUTS))
    out = tmp_path / "own.toml"
    words = ["--set", "data.client_column=user", "--set", setting, "--out", str(out)]
    ended = flowdup("init", path, *words)
    assert ended.code == 2 and told in ended.error
    assert not out.exists()


def test_init_refuses_columns_where_there_are_none(tmp_path: Path) -> None:
    for client in range(4):
        (tmp_path / "own").mkdir(exist_ok=True)
        np.savez(tmp_path / "own" / f"{client}.npz", x=np.eye(6, 2), y=np.arange(6) % 2)
    words = ["--set", "data.label_column=kind", "--out", str(tmp_path / "own.toml")]
    ended = flowdup("init", tmp_path / "own", *words)
    assert ended.code == 2 and "'data.label_column' says how to read columns" in ended.error
    assert flowdup("init", tmp_path / "own", *words[2:]).code == 0
