"""One case: a kind of file, changed by a number, and read as a user would have it read.

A case returns when flowdup accepts what it read, and then says so in a word; it raises a
FlowdupError where flowdup refuses.  Anything else that it raises is a failure of flowdup.
"""

import io
import json
import os
import time
import warnings
from collections.abc import Callable
from importlib.resources import files
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from crafted import seal, table_of, with_table, write_model, write_tensors
from safetensors.torch import load_file, save
from small import client, population

import flowdup
from flowdup.config import Config, load_config
from flowdup.data import ClientData, load_population
from flowdup.data.user_data import read_folder, read_inputs, read_table
from flowdup.random import Stream
from flowdup.run import RunFolder, Simulation, write_report
from flowdup.run.comparison import read_comparison
from flowdup.settings import plain, setting_paths
from fuzz import corpus
from fuzz.bench import Bench
from fuzz.mutations import (
    change_bytes,
    change_text,
    change_tree,
    json_text,
    like,
    odd,
    to_toml,
    toml_value,
)
from fuzz.own_clients import csv_files, image_folders, image_tables, tar_shards

SENT = torch.zeros(2, 1, 8, 8, dtype=torch.uint8)


def finite(tensors: dict[str, torch.Tensor]) -> None:
    if not all(bool(t.isfinite().all()) for t in tensors.values()):
        raise AssertionError("NaN or infinite numbers were accepted")


def load_own(folder: Path) -> None:
    """Open a checkpoint for use, and one in two times to train on."""
    federation = flowdup.load(folder)
    finite(federation.psi)
    if tuple(federation.spec.inputs.shape) == (1, 8, 8):
        federation.personalize(SENT)


def header(random: Random, bench: Bench) -> None:
    folder = bench.copy("own") / "checkpoint"
    path = folder / "checkpoint.json"
    table = json.loads(path.read_bytes())
    changed = change_tree(random, table)
    sealable = isinstance(changed, dict) and random.randrange(20)
    path.write_bytes(seal(changed) if sealable else json_text(random, changed))
    load_own(folder)


def consistent(random: Random, bench: Bench) -> None:
    """Header and tensors agree with each other, and with nothing else."""
    folder = bench.copy("own") / "checkpoint"
    path = folder / "checkpoint.json"
    table = json.loads(path.read_bytes())
    tensors = load_file(folder / table["tensors"]["file"])
    shapes = table["federation"]["shapes"]
    name = random.choice([n for n in shapes if n.startswith("psi/")])
    own = name.removeprefix("psi/")
    twins = [name, f"server/mean/{own}", f"server/square/{own}"]
    shape = [random.choice((0, 1, s, s + 1, 2 * s)) for s in shapes[name]]
    shape += [1] * random.randrange(2)
    new = random.choice((name, f"{name}x", "psi/", "psi/a/b"))
    del shapes[name]
    shapes[new] = shape
    for twin in twins:
        del tensors[twin]
        tensors[twin.replace(own, new.removeprefix("psi/"))] = torch.zeros(shape)
    if random.randrange(2):
        table["federation"] = change_tree(random, table["federation"])
    path.write_bytes(seal(table))
    write_tensors(folder, save(tensors))
    load_own(folder)


def familiarity(random: Random, bench: Bench) -> None:
    """Of a whole checkpoint: what tells foreign clients."""
    folder = bench.copy("own")
    path = next(folder.rglob("familiarity.json"))
    table, how = json.loads(path.read_bytes()), random.randrange(10)
    if how == 0:
        path.write_bytes(change_bytes(random, path.read_bytes()))
    else:
        changed = change_tree(random, table["familiarity"] if how > 1 else table)
        changed = table | {"familiarity": changed} if how > 1 else changed
        path.write_bytes(seal(changed) if isinstance(changed, dict) else b"[]")
    federation = flowdup.load(folder)
    if federation.summary:
        verdict = federation.familiarity(SENT)
        assert verdict.score >= 0 and verdict.threshold > 0


def tensors(random: Random, bench: Bench) -> None:
    folder = bench.copy("own") / "checkpoint"
    path = next(folder.glob("*.safetensors"))
    content, how = path.read_bytes(), random.randrange(4)
    if how == 0:
        write_tensors(folder, change_bytes(random, content))
    elif how == 1:
        table = change_tree(random, table_of(content))
        write_tensors(folder, with_table(content, table))
    elif how == 2:
        length = int.from_bytes(content[:8], "little")
        head = change_bytes(random, content[: 8 + length])
        write_tensors(folder, head + content[8 + length :])
    else:
        stored = load_file(path)
        change_values(random, stored)
        write_tensors(folder, save(stored))
    load_own(folder)
    config = flowdup.read_config({k: v for k, v in corpus.TABLE.items() if k != "data"})
    finite(Simulation(config, population()).load_state(folder).psi)


def change_values(random: Random, stored: dict[str, torch.Tensor]) -> None:
    name = random.choice(sorted(stored))
    tensor = stored[name].clone()
    flat = tensor.reshape(-1)
    value = random.choice((torch.nan, torch.inf, -torch.inf, 3e38, -1.0, 1e-45))
    how = random.randrange(7)
    if how < 3 and len(flat):
        flat[random.randrange(len(flat))] = value
        stored[name] = tensor
    elif how == 3:
        kinds = (torch.float64, torch.float16, torch.int64, torch.bool, torch.bfloat16)
        stored[name] = tensor.to(random.choice(kinds))
    elif how == 4:
        stored[name] = tensor.reshape(-1, 1) if random.randrange(2) else tensor.reshape(-1)[:0]
    elif how == 5:
        del stored[name]
    else:
        place = random.choice(("psi/x", "server/x", "server/mean/x", "method/x", "x", "psi"))
        stored[place] = torch.zeros(3)


def model(random: Random, bench: Bench) -> None:
    path = bench.copy("model.safetensors")
    content, how = path.read_bytes(), random.randrange(4)
    table = table_of(content)
    about = json.loads(table["__metadata__"]["flowdup"])
    if how == 0:
        path.write_bytes(change_bytes(random, content))
    elif how == 1:
        path.write_bytes(with_table(content, change_tree(random, table)))
    elif how == 2:
        text = json_text(random, change_tree(random, about)).decode()
        write_model(path, text, load_file(path))
    else:
        weights = load_file(path)
        change_values(random, weights)
        write_model(path, json.dumps(about), weights)
    found = flowdup.load_model(path)
    finite(dict(found.module.named_parameters()))
    if found.inputs.shape == (1, 8, 8) and found.inputs.dtype == "uint8":
        found.predict(SENT)


def config(random: Random, bench: Bench) -> None:
    path = bench.fresh("x.toml")
    if random.randrange(2):
        table = plain(flowdup.read_config(corpus.TABLE))
        grid = {"client.optimizer.lr": [0.1, 0.3]}
        variants = {"a": {"method": {"name": "fedavg"}}, "b": {"grid": grid}}
        if random.randrange(2):
            table |= {"compare": {"seeds": [0, 1], "variants": variants}}
        text = to_toml(changed) if isinstance(changed := change_tree(random, table), dict) else ""
    else:
        presets = files("flowdup") / "presets"
        whole = (bench.source / "run" / "config.toml").read_text()
        whole = random.choice((whole, (presets / "demo.toml").read_text("utf-8")))
        text = change_text(random, whole)
    content = text.encode(errors="surrogatepass")
    path.write_bytes(content if random.randrange(4) else change_bytes(random, content))
    if random.randrange(4):
        load_config(str(path))
    else:
        read_comparison(str(path), bench.scratch)


def settings(random: Random, bench: Bench) -> None:
    """`--set KEY=VALUE` over all keys; what is accepted is made ready to run."""
    path = bench.copy("run") / "config.toml"
    paths = sorted(set(setting_paths(Config, "")))
    table, texts = plain(flowdup.read_config(corpus.TABLE)), []
    for _ in range(random.choice((1, 1, 2, 3))):
        key = random.choice(paths)
        value = like(random, current(table, key)) if random.randrange(2) else odd(random)
        text = toml_value(value) if random.randrange(2) else str(value)
        texts.append(f"{key}={text}" if random.randrange(20) else change_text(random, key + "=1"))
    found = load_config(str(path), texts)
    if random.randrange(2):
        load_population(found.data, Stream(found.seed).child("data"))
    else:
        simulation = Simulation(found)
        state = simulation.initial_state()
        if found.server.cohort <= 100 and found.client.epochs <= 10:  # else it is long, and right
            next(simulation.rounds(state))


def current(table: Any, key: str) -> Any:
    """The value of a setting; None where another method has it."""
    for part in key.split("."):
        table = table.get(part) if isinstance(table, dict) else None
    return table


def clients(random: Random, bench: Bench) -> None:
    """Folders of .npz files, and inputs as .npz or .npy."""
    name = random.choice(("stored.npz", "packed.npz", "mapped.npy"))
    path = bench.copy("clients") / name
    content, how = path.read_bytes(), random.randrange(3)
    if how == 0 or name == "mapped.npy":
        path.write_bytes(change_bytes(random, content))
    elif how == 1:  # a header that lies, in a zip that does not
        with np.load(path) as stored:
            arrays = {n: stored[n] for n in stored.files}
        members = {}
        for key, array in arrays.items():
            buffer = io.BytesIO()
            np.save(buffer, array)
            members[key] = buffer.getvalue()
        key = random.choice(sorted(members))
        members[key] = change_bytes(random, members[key][:128]) + members[key][128:]
        _zip(path, members)
    else:
        kinds = ("O", "U3", "c16", "M8[s]", "f2", "g", "u8", "b1", "V3", "i1")
        array = np.zeros(random.choice(((), (0,), (3,), (3, 0), (3, 2), (0, 4))), "f4")
        with warnings.catch_warnings(action="ignore"):
            odd_array = array.astype(random.choice(kinds))
        arrays = {"x": np.ones((3, 5)), random.choice("xyz"): odd_array}
        np.savez(path, **arrays)
    if random.randrange(2):
        for group in read_folder(path.parent).values():
            for found in group:
                _check(found)
    else:
        read_inputs(path)


def _zip(path: Path, members: dict[str, bytes]) -> None:
    import zipfile  # noqa: PLC0415

    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in members.items():
            archive.writestr(f"{name}.npy", content)


def _check(found: ClientData) -> None:
    spec = flowdup.InputSpec(tuple(found.x.shape[1:]), "float32", 4)
    if found.x.dtype == torch.uint8:
        spec = flowdup.InputSpec(tuple(found.x.shape[1:]), "uint8", 4)
    spec.check(found)


def tables(random: Random, bench: Bench) -> None:
    name = random.choice(("plain.parquet", "packed.parquet", "data.arrow"))
    path = bench.copy(name)
    if random.randrange(4):
        path.write_bytes(change_bytes(random, path.read_bytes()))
    else:
        columns = corpus.table().to_pydict()
        key = random.choice(sorted(columns))
        columns[key] = [random.choice((None, 1, 2**40, "x", [1.0], b"x", True)) for _ in range(5)]
        try:
            rows = pa.table(columns)
        except pa.ArrowException:  # values that no column can hold together
            rows = pa.table(columns | {key: [None] * 5})
        path = path.with_suffix(".parquet")
        pq.write_table(rows, path)
    columns = random.choice((["x"], ["age"], ["x", "age"], ["missing"], []))
    for group in read_table(path, "client", "label", columns).values():
        for found in group:
            _check(found)


def images(random: Random, bench: Bench) -> None:
    source, files = random.choice(corpus.image_sets())
    folder = bench.fresh("data")
    changed = random.choice(sorted(files))
    for name, content in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(change_bytes(random, content) if name == changed else content)
    source.load(folder)


def femnist(random: Random, bench: Bench) -> None:
    source, stored = corpus.femnist()
    folder = bench.fresh("data") / "femnist"
    folder.mkdir(parents=True)
    changed = json_text(random, change_tree(random, stored))
    if random.randrange(3) == 0:
        changed = change_bytes(random, changed)
    (folder / "all_data_0_niid_1.json").write_bytes(changed)
    source.load(folder.parent)


def report(random: Random, bench: Bench) -> None:
    """A report is written whatever the files say: it may refuse nothing."""
    folder = bench.copy("run")
    for _ in range(random.choice((1, 1, 2))):
        path = folder / random.choice(
            ("metrics.jsonl", "evaluation.json", "evaluation.json", "embedding.svg", "config.toml")
        )
        content = (bench.source / "run" / path.name).read_bytes()
        if path.suffix == ".json" and random.randrange(4):
            content = json_text(random, change_tree(random, json.loads(content)))
        elif path.suffix == ".jsonl" and random.randrange(4):
            rows = [json.loads(line) for line in content.splitlines()]
            place = random.randrange(len(rows))
            lines = [json.dumps(row).encode() for row in rows]
            lines[place] = json_text(random, change_tree(random, rows[place]))
            content = b"\n".join(lines)
        else:
            content = change_bytes(random, content)
        path.write_bytes(content)
    try:
        page = write_report(folder).read_text()
    except flowdup.FlowdupError as error:
        raise AssertionError("a report was refused") from error
    assert "<script" not in page
    RunFolder(folder).read_metrics()
    RunFolder(folder).read_evaluation()


def resume(random: Random, bench: Bench) -> None:
    """A run folder with one file changed, continued by one round or evaluated."""
    folder = bench.copy(random.choice(("run", "prox")))
    names = ("clients.json", "config.toml", "metrics.jsonl", "checkpoint/checkpoint.json")
    path = folder / random.choice(names)
    content, number = path.read_bytes(), 0
    if path.parent != folder:  # only with a right seal is it read further
        number = random.choice((0, 1, 3, 1000, 2 * 10**7, 2**62, 2**63 - 1))
        content = seal(json.loads(content) | {"round": number})
    elif path.suffix == ".json" and random.randrange(2):
        content = json_text(random, change_tree(random, json.loads(content)))
    else:
        content = change_bytes(random, content)
    path.write_bytes(content)
    if random.randrange(2):
        flowdup.evaluate_run(folder)
    else:
        found = load_config(str(folder / "config.toml"), [f"server.rounds={max(3, number)}"])
        list(flowdup.train_run(found, folder, resume=True))


def interface(random: Random, bench: Bench) -> None:
    """What callers in Python hand over."""
    whole = client(0, 5)
    spec: dict[str, Any] = {"shape": (1, 8, 8), "dtype": "uint8", "classes": 4}
    spec |= {random.choice(("shape", "dtype", "classes", "mean", "std")): odd(random)}
    x, y, traits = whole.x, whole.y, {"site": odd(random)}
    how = random.randrange(3)
    if how == 0:
        flowdup.InputSpec(**spec).check(whole)
    inputs = flowdup.InputSpec((1, 8, 8), "uint8", 4)
    if how == 1:
        given: Any = random.choice((odd(random), [odd(random)], [*x.tolist()[:1], odd(random)]))
        inputs.check(ClientData(given, y))
    inputs.check(ClientData(x, y, "a", traits))


Case = Callable[[Random, Bench], None]
KINDS: dict[str, tuple[Case, int]] = {  # with how many of about 10,000 cases
    "checkpoint header": (header, 1500),
    "checkpoint header and tensors": (consistent, 500),
    "checkpoint tensors": (tensors, 900),
    "familiarity": (familiarity, 400),
    "personal model": (model, 1200),
    "config": (config, 1000),
    "settings": (settings, 1200),
    "npz and npy": (clients, 1000),
    "parquet and arrow": (tables, 900),
    "image sets (idx, gzip, tar, npz)": (images, 500),
    "femnist": (femnist, 300),
    "report (metrics, evaluation, figure, config)": (report, 500),
    "resumed run (clients, config, metrics)": (resume, 200),
    "python interface": (interface, 300),
    "folders of images": (image_folders, 300),
    "csv": (csv_files, 300),
    "tar shards": (tar_shards, 300),
    "tables of images": (image_tables, 300),
}


def _foreign_error(random: Random, bench: Bench) -> None:
    raise ZeroDivisionError


def _hang(random: Random, bench: Bench) -> None:
    time.sleep(60)


def _death(random: Random, bench: Bench) -> None:
    os._exit(3)


PLANTED: dict[str, tuple[Case, int]] = {  # what the fuzzer must report
    "a foreign error": (_foreign_error, 1),
    "a hang": (_hang, 1),
    "a death": (_death, 1),
}
