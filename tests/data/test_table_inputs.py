"""Inputs of one client are read from every kind of table that training reads."""

import json
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.csv
import pyarrow.parquet
import pytest
from commands.here import flowdup
from data.test_columns import settings, table

from flowdup import load, read_config, train_run
from flowdup.data.table_inputs import clients_named_in
from flowdup.data.user_data import read_inputs
from flowdup.errors import DataError

COLUMNS = ("user", "activity", "temp", "hum", "press", "volt")
LABELS = "data.label_column=activity"
KINDS = ("all.parquet", "no-ending", "parquets", "csvs", "dataset", "dataset/data.arrow")


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run, its table as CSV, and the same rows in every other kind of table."""
    folder = tmp_path_factory.mktemp("kinds")
    rows = pyarrow.csv.read_csv(table(folder / "all.csv", COLUMNS))
    write(rows, folder / "all.parquet")
    write(rows, folder / "no-ending")
    write(rows.slice(0, 40), folder / "parquets" / "1.parquet")
    write(rows.slice(40), folder / "parquets" / "2.parquet")
    table(folder / "csvs" / "1.csv", COLUMNS, range(5))
    table(folder / "csvs" / "2.csv", COLUMNS, range(5, 8))
    state = {"_data_files": [{"filename": "data.arrow"}]}
    (folder / "dataset").mkdir()
    (folder / "dataset" / "state.json").write_text(json.dumps(state))
    with pyarrow.ipc.new_stream(folder / "dataset" / "data.arrow", rows.schema) as stream:
        stream.write_table(rows)
    inputs = {"input_columns": [*COLUMNS[2:]]}
    path = folder / "all.parquet"
    list(train_run(read_config(settings(path, **inputs)), folder / "run"))
    return folder


def write(rows: Any, path: Path) -> Path:
    path.parent.mkdir(exist_ok=True)
    pyarrow.parquet.write_table(rows, path)
    return path


@pytest.mark.parametrize("kind", KINDS)
def test_one_client_of_any_kind_of_table_gets_the_model_that_it_gets_of_a_csv(
    home: Path, tmp_path: Path, kind: str
) -> None:
    said = []
    for source in (home / "all.csv", home / kind):
        model = tmp_path / f"{source.name}.safetensors"
        words = ("personalize", home / "run", "--input", source, "--json", "--out")
        assert "rows of 8 clients, and one model is made of all" in flowdup(*words, model).error
        ended = flowdup(*words, model, "--client", "u3")
        assert ended.code == 0, ended.error
        assert json.loads(ended.out)["points"] == 12
        said.append(flowdup("predict", model, "--input", home / kind).out)
    assert said[0] == said[1] and len(said[0].splitlines()) == 96


def test_a_parquet_file_of_one_client_is_evaluated_as_its_csv_is(
    home: Path, tmp_path: Path
) -> None:
    rows = pyarrow.csv.read_csv(table(tmp_path / "u3.csv", COLUMNS[1:], [3]))
    found = []
    for source in (tmp_path / "u3.csv", write(rows, tmp_path / "u3.parquet")):
        ended = flowdup("evaluate", home / "run", "--json", "--input", source, "--set", LABELS)
        assert ended.code == 0, ended.error
        found.append(json.loads(ended.out)["clients"])
    assert found[0] == found[1] and [client["name"] for client in found[0]] == ["u3"]


def test_a_column_of_lists_is_read_beside_others_in_the_shape_of_the_federation(
    tmp_path: Path,
) -> None:
    columns = {"client": [1, 1, 2], "x": [[1.0, 2, 3, 4]] * 3, "label": [0, 1, 0], "age": [7, 8, 9]}
    path = write(pyarrow.table(columns), tmp_path / "lists.parquet")
    assert clients_named_in(path) == ["1", "2"]
    assert read_inputs(path, (1, 2, 2), client="1").tolist() == [[[[1, 2], [3, 4]]]] * 2
    assert read_inputs(path, (4,)).shape == (3, 4)
    two = columns | {"z": columns["x"]}
    del two["x"]
    two["w"] = two["z"]
    with pytest.raises(DataError, match="several columns of lists or images, z, w: keep"):
        read_inputs(write(pyarrow.table(two), path), (4,))


def test_a_folder_of_clients_own_csv_files_is_not_read_as_one_client(
    home: Path, tmp_path: Path
) -> None:
    for client in (3, 4):
        table(tmp_path / "own" / f"{client}.csv", COLUMNS[1:], [client])
    out = tmp_path / "me.safetensors"
    ended = flowdup("personalize", home / "run", "--input", tmp_path / "own", "--out", out)
    assert ended.code == 2 and "each is a client's own: give one of them" in ended.error
    own = read_inputs(tmp_path / "own" / "3.csv", (4,), load(home / "run").spec.inputs.columns)
    assert own.shape == (12, 4)


@pytest.mark.parametrize("kind", ["all.csv", "all.parquet"])
def test_one_clients_model_answers_for_its_own_rows_or_with_a_warning(
    home: Path, tmp_path: Path, kind: str
) -> None:
    model, source = tmp_path / "me.safetensors", home / kind
    made = flowdup("personalize", home / "run", "--input", source, "--client", "u3", "--out", model)
    assert made.code == 0, made.error
    every = flowdup("predict", model, "--input", source)
    own = flowdup("predict", model, "--input", source, "--client", "u3")
    assert "rows of 8 clients, and the model of one is applied to all of them" in every.error
    assert own.code == every.code == 0 and not own.error
    assert own.out.splitlines() == every.out.splitlines()[36:48]
    nobody = flowdup("predict", model, "--input", source, "--client", "nobody")
    assert nobody.code == 2 and "no row whose column 'user' is 'nobody'" in nobody.error


def test_a_global_model_answers_for_all_clients_without_a_warning(
    home: Path, tmp_path: Path
) -> None:
    model = load(home / "run").global_model()
    model.client_column = "user"
    model.save(tmp_path / "all.safetensors")
    ended = flowdup("predict", tmp_path / "all.safetensors", "--input", home / "all.csv")
    assert ended.code == 0 and not ended.error
