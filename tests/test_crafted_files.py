"""Files with a right seal and wrong contents: one sentence, and little memory."""

import json
import os
import shutil
import tracemalloc
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from crafted import change_header, change_tensors, seal, table_of, with_table, write_model
from crafted import write_tensors as write
from safetensors.torch import save
from small import METHODS, SPEC, client, population
from staged import staged

import flowdup
from flowdup.calibration import uncorrected
from flowdup.checkpoint import load_checkpoint, save_checkpoint
from flowdup.errors import CheckpointError
from flowdup.memory import memory_limit
from flowdup.run import Simulation
from flowdup.stored_tensors import open_tensors


@pytest.fixture(scope="session")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("run")
    config = flowdup.read_config(TABLE)
    list(flowdup.train_run(config, path, population=population()))
    return path


TABLE: dict[str, Any] = {
    "model": "mlp",
    "method": METHODS["flowdup"],
    "server": {"rounds": 1, "cohort": 2},
}


@pytest.fixture
def folder(trained: Path, tmp_path: Path) -> Path:
    shutil.copytree(trained / "checkpoint", tmp_path / "checkpoint")
    return tmp_path / "checkpoint"


def refused(folder: Path) -> str:
    """The sentence with which a checkpoint is refused, which takes little memory."""
    tracemalloc.start()
    try:
        with pytest.raises(CheckpointError) as found:
            flowdup.load(folder)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 64e6
    sentence = str(found.value)
    assert len(sentence) < 1000 and "\n" not in sentence and ": " in sentence
    return sentence


HUGE = 10**18
LONG = 10**400


def put(*path: Any, to: Any) -> Callable[[dict[str, Any]], None]:
    def change(header: dict[str, Any]) -> None:
        for key in path[:-1]:
            header = header[key]
        header[path[-1]] = to

    return change


def puts(*path: Any, values: Sequence[Any]) -> list[Callable[[dict[str, Any]], None]]:
    return [put(*path, to=value) for value in values]


def drop(*path: str) -> Callable[[dict[str, Any]], None]:
    def change(header: dict[str, Any]) -> None:
        for key in path[:-1]:
            header = header[key]
        del header[path[-1]]

    return change


def input_changes(*at: str) -> list[Callable[[dict[str, Any]], None]]:
    inputs = (*at, "inputs")
    values: dict[str, list[Any]] = {
        "shape": [[], [0], [-1, 8, 8], [True, 8, 8], [1.0, 8, 8], [HUGE] * 3, [LONG], "188", None],
        "dtype": ["object", "float16", 3, None],
        "classes": [0, -3, True, 4.0, 10**7, HUGE, LONG, "4"],
        "mean": [[], [1, 2], ["a"], None, 0.3, [LONG], [True]],
        "std": [[0], [-1], [1e-320], [1e300], [LONG], [None]],
    }
    return [
        *puts(*inputs, values=(None, [], 3, {})),
        *(put(*inputs, key, to=v) for key in values for v in values[key]),
    ]


FEDERATION = ("federation",)
METHOD = ("federation", "method")
CHANGES = {
    "round": puts("round", values=(-1, True, 1.5, "3", None, [], LONG)),
    "format": puts("format", values=(None, 2.0, True, "2", LONG, {}, 99)),
    "keys": [drop(k) for k in ("round", "federation", "tensors", "format")]
    + [drop("federation", k) for k in ("seed", "model", "method", "inputs", "shapes")]
    + [drop("federation", "inputs", k) for k in ("shape", "dtype", "classes", "mean", "std")],
    "file": puts(
        "tensors",
        "file",
        values=(
            "../x.safetensors",
            "/etc/passwd",
            "",
            "a/b.safetensors",
            3,
            None,
            "checkpoint.json",
        ),
    ),
    "digest": puts("tensors", "sha256", values=(None, 7, "", [])),
    "tensors": puts("tensors", values=(None, 7, "", [])),
    "federation": puts("federation", values=(None, 7, "", [])),
    "seed": puts(*FEDERATION, "seed", values=(True, 1.5, "x", None, LONG, [])),
    "model": puts(*FEDERATION, "model", values=("nope", 1, None, "", ["mlp"])),
    "method": puts(*FEDERATION, "method", values=(None, [], "fedavg", {"name": "nope"}))
    + puts(*METHOD, "name", values=(None, 3, [], "fedavg"))
    + puts(*METHOD, "subspace", "k", values=(-1, HUGE, True, "7", 2.5, LONG))
    + puts(*METHOD, "hypernetwork", "hidden", values=(0, 10**6, HUGE, LONG, None))
    + puts(*METHOD, "hypernetwork", "embedding", values=(0, 10**6, 10**7, HUGE, 1.0))
    + puts(*METHOD, "hypernetwork", "layers", values=(10**6, HUGE))
    + puts(*METHOD, "hypernetwork", "backbone", values=("nope", "resnet18", 4))
    + [put(*METHOD, "strange", to=1)],
    "inputs": input_changes("federation"),
    "shapes": puts(*FEDERATION, "shapes", values=(None, [], {}, {"psi/a": "x"}))
    + puts(
        *FEDERATION,
        "shapes",
        "psi/psi_r",
        values=([61], [-60], [60.0], [True], [HUGE], [LONG], [[60]], "60", None, {}, [60, 1]),
    )
    + [drop(*FEDERATION, "shapes", "psi/psi_r"), put(*FEDERATION, "shapes", "psi/more", to=[3])],
    "stage": puts("stage", values=(None, 3, [], {}))
    + puts("stage", "number", values=(None, -1, True, 1.5, "0", LONG))
    + puts("stage", "began", values=(None, -1, 2, HUGE, LONG, "0")),
    "best": puts("best", values=(3, [], {}, "1", True))
    + puts("best", "round", values=(None, 0, 2, -1, 1.0, LONG))
    + puts("best", "accuracy", values=(None, "x", LONG, True, [], 1e400))
    + puts("best", "misses", values=(None, -1, 0.5, LONG)),
    "theta": puts(*FEDERATION, "shapes", "theta/1.weight", values=([64, 65], [HUGE, HUGE], [])),
}


@pytest.mark.parametrize("kind", CHANGES)
def test_a_header_that_describes_nothing_possible_is_one_sentence(kind: str, folder: Path) -> None:
    right = (folder / "checkpoint.json").read_bytes()
    for change in CHANGES[kind]:
        (folder / "checkpoint.json").write_bytes(right)
        change_header(folder, change)
        refused(folder)
    (folder / "checkpoint.json").write_bytes(right)
    flowdup.load(folder)


@pytest.mark.parametrize(
    "content",
    [b"[" * 10**6, b'{"a":' * 10**5, b"9" * 5000, b'{"sha256": NaN}', b"null", b"\xff\xfe{", b""],
    ids=["lists", "objects", "digits", "nan", "null", "utf-16", "empty"],
)
def test_a_header_that_is_no_plain_json_is_one_sentence(content: bytes, folder: Path) -> None:
    (folder / "checkpoint.json").write_bytes(content)
    assert "restore the folder" in refused(folder)


def test_a_key_that_stands_twice_is_refused_though_the_seal_fits_the_last(folder: Path) -> None:
    path = folder / "checkpoint.json"
    path.write_bytes(path.read_bytes().replace(b'"round": 1', b'"round": 9, "round": 1'))
    assert "restore the folder" in refused(folder)


def test_infinity_in_a_sealed_header_is_refused(folder: Path) -> None:
    change_header(folder, put(*METHOD, "regularization", to=float("inf")))
    assert "restore the folder" in refused(folder)


TENSORS: dict[str, Callable[[dict[str, torch.Tensor]], object]] = {
    "missing": lambda t: t.pop("psi/psi_r"),
    "more": lambda t: t.update({"psi/more": torch.zeros(3)}),
    "no group": lambda t: t.update({"more": torch.zeros(3)}),
    "another group": lambda t: t.update({"other/x": torch.zeros(3)}),
    "shape": lambda t: t.update({"psi/psi_r": torch.zeros(61)}),
    "dimensions": lambda t: t.update({"psi/psi_r": torch.zeros(60, 1)}),
    "type": lambda t: t.update({"psi/psi_r": torch.zeros(60, dtype=torch.int64)}),
    "half": lambda t: t.update({"psi/psi_r": torch.zeros(60, dtype=torch.float16)}),
    "complex": lambda t: t.update({"psi/psi_r": torch.zeros(60, dtype=torch.complex64)}),
    "nan": lambda t: t["psi/psi_r"].fill_(torch.nan),
    "infinite": lambda t: t["psi/h2.output.bias"][3:4].fill_(-torch.inf),
    "beyond float32": lambda t: t.update(
        {"psi/psi_r": torch.full((60,), 1e300, dtype=torch.float64)}
    ),
    "infinite moment": lambda t: t["server/mean/psi_r"].fill_(torch.inf),
    "negative square": lambda t: t["server/square/psi_r"].fill_(-1.0),
    "negative steps": lambda t: t["server/steps"].fill_(-1.0),
    "moment of nothing": lambda t: t.update({"server/mean/other": torch.zeros(3)}),
    "moment of another shape": lambda t: t.update({"server/mean/psi_r": torch.zeros(3)}),
    "a moment missing": lambda t: t.pop("server/mean/psi_r"),
    "a moment of no optimizer": lambda t: t.update(
        {n.replace("psi/", "server/evil/"): p.clone() for n, p in t.items() if n[:4] == "psi/"}
    ),
    "state of another method": lambda t: t.update({"method/evil": torch.zeros(300 * 2**18)}),
    "steps of many": lambda t: t.update({"server/steps": torch.zeros(7)}),
}


@pytest.mark.parametrize("kind", TENSORS)
def test_tensors_other_than_those_described_are_one_sentence(kind: str, folder: Path) -> None:
    change_tensors(folder, lambda t: (TENSORS[kind](t), None)[1])
    assert "restore the folder" in refused(folder)


def test_a_table_of_tensors_that_lies_is_one_sentence(folder: Path) -> None:
    content = next(folder.glob("*.safetensors")).read_bytes()
    table = table_of(content)
    entry = table["psi/psi_r"]
    changes: list[dict[str, Any]] = [
        {"shape": [HUGE, HUGE]},
        {"shape": [-60]},
        {"shape": [LONG]},
        {"shape": None},
        {"dtype": "F128"},
        {"dtype": 3},
        {"data_offsets": [0, HUGE]},
        {"data_offsets": [8, 4]},
        {"data_offsets": []},
        {"data_offsets": [0, 240]},
    ]
    lies: list[Any] = [{"psi/psi_r": entry | change} for change in changes]
    for lie in [*lies, {"psi/psi_r": None}, {"__metadata__": 3}, {"__metadata__": {"a": 1}}]:
        write(folder, with_table(content, table | lie))
        refused(folder)
    for whole in (b"", b"\xff" * 8, b"\x02" + bytes(7) + b"[]", content + b"x", content[:-1]):
        write(folder, whole)
        refused(folder)
    nested = b"[" * 10**5
    write(folder, len(nested).to_bytes(8, "little") + nested)
    refused(folder)


def test_a_file_of_a_terabyte_of_nothing_is_not_read(folder: Path) -> None:
    path = next(folder.glob("*.safetensors"))
    os.truncate(path, 2**40)
    refused(folder)
    size = 2**40
    table = {"method/x": {"dtype": "U8", "shape": [size], "data_offsets": [0, size]}}
    text = json.dumps(table).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text)
    os.truncate(path, 8 + len(text) + size)
    refused(folder)


def test_values_that_do_not_fit_in_memory_twice_are_not_read(tmp_path: Path) -> None:
    """Bytes and tensors stand beside each other, and one thing may take half of the memory."""
    size = memory_limit() // 4 + 2**20
    table = {"x": {"dtype": "U8", "shape": [size], "data_offsets": [0, size]}}
    text = json.dumps(table).encode()
    path = tmp_path / "large.safetensors"
    path.write_bytes(len(text).to_bytes(8, "little") + text)
    os.truncate(path, 8 + len(text) + size)
    with open_tensors(path) as file, pytest.raises(ValueError, match="reading it needs"):
        file.read()


def test_a_pipe_in_place_of_tensors_does_not_wait(folder: Path) -> None:
    path = next(folder.glob("*.safetensors"))
    path.unlink()
    os.mkfifo(path)
    refused(folder)


def test_a_state_of_another_optimizer_or_method_is_not_trained_on(
    folder: Path, trained: Path
) -> None:
    simulation = Simulation(flowdup.read_config(TABLE), population())
    simulation.load_state(folder)

    def forget(tensors: dict[str, torch.Tensor]) -> None:
        for name in [n for n in tensors if n.startswith("server/")]:
            del tensors[name]

    change_tensors(folder, forget)
    load_checkpoint(folder)  # consistent in itself
    with pytest.raises(CheckpointError, match="another server optimizer"):
        simulation.load_state(folder)
    shutil.copytree(trained / "checkpoint", folder, dirs_exist_ok=True)
    change_tensors(folder, lambda t: t.update({"method/mu": torch.zeros(())}))
    with pytest.raises(CheckpointError, match=r"its 'method/mu' is F32 \[\]"):
        simulation.load_state(folder)
    change_header(folder, put(*FEDERATION, "shapes", "method/mu", to=[]))
    load_checkpoint(folder)  # consistent in itself
    with pytest.raises(CheckpointError, match="defined otherwise"):
        simulation.load_state(folder)
    assert "defined otherwise" in refused(folder)


def test_a_methods_own_state_is_that_described(tmp_path: Path) -> None:
    config = flowdup.read_config(TABLE | {"method": METHODS["fedprox"]})
    list(flowdup.train_run(config, tmp_path, population=population()))
    folder = tmp_path / "checkpoint"
    changes: list[Callable[[dict[str, torch.Tensor]], object]] = [
        lambda t: t.pop("method/mu"),
        lambda t: t.update({"method/mu": torch.zeros(3)}),
        lambda t: t.update({"method/mu": torch.zeros((), dtype=torch.int64)}),
    ]
    right = next(folder.glob("*.safetensors")).read_bytes()
    for change in changes:
        write(folder, right)
        change_tensors(folder, lambda t, change=change: (change(t), None)[1])  # type: ignore[misc]
        assert "'method/mu'" in refused(folder)
    write(folder, right)
    flowdup.load(folder)


def test_a_round_that_was_never_trained_takes_no_memory_when_resumed(
    trained: Path, tmp_path: Path
) -> None:
    """Every round after the first is missing from metrics.jsonl, and named in few words."""
    run = shutil.copytree(trained, tmp_path / "run")
    last = 2 * 10**7
    change_header(run / "checkpoint", put("round", to=last))
    server = TABLE["server"] | {"rounds": last}
    tracemalloc.start()
    try:
        with pytest.warns(UserWarning, match=f"of rounds 2 to {last}, which were trained"):
            config = flowdup.read_config(TABLE | {"server": server})
            list(flowdup.train_run(config, run, resume=True, population=population()))
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 64e6


def test_a_methods_own_nan_is_kept_and_another_is_refused(tmp_path: Path) -> None:
    """FedProx knows no mean loss before its first period ends."""
    table = TABLE | {"method": METHODS["fedprox"]}
    config = flowdup.read_config(table)
    list(flowdup.train_run(config, tmp_path, population=population()))
    simulation, folder = Simulation(config, population()), tmp_path / "checkpoint"
    assert simulation.load_state(folder).method_state["before"].isnan()
    change_tensors(folder, lambda t: (t["method/mu"].fill_(torch.nan), None)[1])
    with pytest.raises(CheckpointError, match="NaN"):
        simulation.load_state(folder)


@pytest.fixture(scope="session")
def model(trained: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model") / "me.safetensors"
    flowdup.load(trained).personalize(client(0, 20).x).save(path)
    return path


def described(path: Path) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    personal = flowdup.load_model(path)
    about = json.loads(table_of(path.read_bytes())["__metadata__"]["flowdup"])
    return about, dict(personal.module.state_dict())


ABOUT: list[Callable[[dict[str, Any]], None]] = [
    *puts("model", values=("nope", 3, None, [], "cnn", "resnet18")),
    *input_changes(),
    drop("model"),
    drop("inputs"),
]


def test_a_model_that_describes_nothing_possible_is_one_sentence(
    model: Path, tmp_path: Path
) -> None:
    path = tmp_path / "me.safetensors"
    for change in ABOUT:
        about, weights = described(model)
        change(about)
        write_model(path, json.dumps(about), weights)
        _refused_model(path)
    for text in ("", "null", "[" * 10**5, '{"model": NaN}', "9" * 5000):
        write_model(path, text, weights)
        _refused_model(path)


def _refused_model(path: Path) -> None:
    with pytest.raises(CheckpointError, match="personalize again"):
        flowdup.load_model(path)


def test_weights_that_are_not_finite_or_not_the_models_are_refused(
    model: Path, tmp_path: Path
) -> None:
    path, (about, weights) = tmp_path / "me.safetensors", described(model)
    name = next(iter(weights))
    wrong: list[dict[str, torch.Tensor]] = [
        {},
        {n: w for n, w in weights.items() if n != name},
        weights | {"more": torch.zeros(2)},
        weights | {name: weights[name][:, 1:].contiguous()},
        weights | {name: weights[name].long()},
        weights | {name: torch.full_like(weights[name], torch.nan)},
        weights | {name: torch.full_like(weights[name], torch.inf)},
        weights | {name: torch.full_like(weights[name].double(), 1e300)},
    ]
    for content in wrong:
        write_model(path, json.dumps(about), content)
        _refused_model(path)
    write_model(path, json.dumps(about), {n: w.double() for n, w in weights.items()})
    assert flowdup.load_model(path).inputs == SPEC


def test_another_projects_weights_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "other.safetensors"
    for content in (save({"a": torch.zeros(2)}), save({}), b"PK\x03\x04", b""):
        path.write_bytes(content)
        _refused_model(path)
    _refused_model(tmp_path / "missing")
    _refused_model(tmp_path)


def test_the_seal_here_is_the_checkpoints(folder: Path) -> None:
    path = folder / "checkpoint.json"
    assert seal(json.loads(path.read_bytes())) == path.read_bytes()


@pytest.fixture(scope="session")
def trained_in_stages(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("stages")
    list(flowdup.train_run(staged(), path, population=population()))
    return path


@pytest.fixture
def last_stage(trained_in_stages: Path, tmp_path: Path) -> Path:
    """A checkpoint with all groups of tensors."""
    shutil.copytree(trained_in_stages / "checkpoint", tmp_path / "last")
    return tmp_path / "last"


OPTIONAL: dict[str, Callable[[dict[str, torch.Tensor]], object]] = {
    "an average missing": lambda t: t.pop("average/psi_r"),
    "an average of another shape": lambda t: t.update({"average/psi_r": torch.zeros(61)}),
    "an average of more": lambda t: t.update({"average/more": torch.zeros(3)}),
    "an average that is infinite": lambda t: t["average/psi_r"].fill_(torch.inf),
    "a correction without its bias": lambda t: t.pop("correction/bias"),
    "a correction of more classes": lambda t: t.update({"correction/bias": torch.zeros(5)}),
    "a correction of more": lambda t: t.update({"correction/evil": torch.zeros(())}),
    "a correction that is NaN": lambda t: t["correction/scale"].fill_(torch.nan),
    "a start without a weight": lambda t: t.pop("start/1.weight"),
    "a start of another shape": lambda t: t.update({"start/1.weight": torch.zeros(2, 2)}),
    "a start of more": lambda t: t.update({"start/more": torch.zeros(3)}),
    "a start of whole numbers": lambda t: t.update(
        {"start/1.weight": torch.zeros(t["start/1.weight"].shape, dtype=torch.int64)}
    ),
    "a start that is infinite": lambda t: t["start/1.bias"].fill_(torch.inf),
    "a group of a new name": lambda t: t.update({"ending/x": torch.zeros(3)}),
}


@pytest.mark.parametrize("kind", OPTIONAL)
def test_averages_corrections_and_starts_other_than_described_are_one_sentence(
    kind: str, last_stage: Path
) -> None:
    flowdup.load(last_stage)
    change_tensors(last_stage, lambda t: (OPTIONAL[kind](t), None)[1])
    assert "restore the folder" in refused(last_stage)


def test_a_start_that_fits_its_description_and_no_model_is_one_sentence(last_stage: Path) -> None:
    """The header, its seal and the tensors agree with each other, and with nothing else."""
    change_tensors(last_stage, lambda t: (t.pop("start/1.weight"), None)[1])
    change_header(last_stage, drop(*FEDERATION, "shapes", "theta/1.weight"))
    load_checkpoint(last_stage)  # consistent in itself
    assert "do not fit the model" in refused(last_stage)


def test_a_start_that_was_taken_away_is_one_sentence(last_stage: Path) -> None:
    def forget(tensors: dict[str, torch.Tensor]) -> None:
        for name in [n for n in tensors if n.startswith("start/")]:
            del tensors[name]

    change_tensors(last_stage, forget)
    assert "another expansion" in refused(last_stage)


def test_states_that_the_settings_know_nothing_of_are_not_trained_on(
    folder: Path, last_stage: Path, tmp_path: Path
) -> None:
    """An average that nobody asked for, a correction of a method without, a stage too many."""
    simulation, state = Simulation.resume(flowdup.read_config(TABLE), folder, population())
    averaged = replace(state, average=state.psi)
    corrected = replace(state, correction=uncorrected(SPEC.classes))
    for changed in (averaged, corrected):
        save_checkpoint(tmp_path / "more", simulation.federation, changed)
        with pytest.raises(CheckpointError, match="another server optimizer or method"):
            simulation.load_state(tmp_path / "more")
    change_header(last_stage, put("stage", "number", to=3))
    with pytest.raises(CheckpointError, match="of a stage that the settings do not have"):
        Simulation.resume(staged(), last_stage, population())
