import json
import resource
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import FrameType

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from small import METHODS, SPEC, STREAM, method, population

from flowdup import load, read_config, train_run
from flowdup.calibration import uncorrected
from flowdup.checkpoint import (
    load_checkpoint,
    remove_checkpoint,
    remove_old_tensors,
    save_checkpoint,
)
from flowdup.errors import CheckpointError, FlowdupError, TrainingError
from flowdup.federation_spec import FederationSpec
from flowdup.methods import MethodConfig
from flowdup.random import philox
from flowdup.run import Simulation
from flowdup.server import BestRound, ServerConfig, ServerState, initial_state

FLOWDUP = method("flowdup")
TABLE = MethodConfig.from_table(METHODS["flowdup"]).table()
SPECIFICATION = FederationSpec.of(STREAM.seed, "cnn-small", TABLE, SPEC, FLOWDUP)


def state(round: int = 3) -> ServerState:
    start = initial_state(ServerConfig(), FLOWDUP, STREAM, torch.device("cpu"), torch.float32)
    return replace(start, round=round)


def same(a: ServerState, b: ServerState) -> bool:
    pairs = ((a.psi, b.psi), (a.optimizer, b.optimizer), (a.method_state, b.method_state))
    return a.round == b.round and all(
        x.keys() == y.keys() and all((x[n] == y[n]).all() for n in x) for x, y in pairs
    )


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    save_checkpoint(tmp_path, SPECIFICATION, state())
    return tmp_path


def test_a_checkpoint_reads_back_as_it_was(saved: Path) -> None:
    specification, loaded = load_checkpoint(saved)
    assert specification == SPECIFICATION
    assert same(loaded, state())


def test_averages_corrections_starts_and_the_best_round_read_back_as_they_were(
    tmp_path: Path,
) -> None:
    base = state()
    whole = replace(
        base,
        average={n: p + 1 for n, p in base.psi.items()},
        correction=uncorrected(SPEC.classes, 0.5),
        stage=2,
        began=1,
        best=BestRound(2, 61.25, 1),
        start=FLOWDUP.f.init(STREAM),
    )
    save_checkpoint(tmp_path, SPECIFICATION, whole)
    loaded = load_checkpoint(tmp_path)[1]
    assert same(loaded, whole)
    assert (loaded.stage, loaded.began, loaded.best) == (2, 1, BestRound(2, 61.25, 1))
    for name in ("average", "correction", "start"):
        stored, wanted = getattr(loaded, name), getattr(whole, name)
        assert stored.keys() == wanted.keys() and stored
        assert all(torch.equal(stored[n], t) for n, t in wanted.items())


def test_a_removed_checkpoint_leaves_what_else_is_in_its_folder(saved: Path) -> None:
    (saved / "notes.txt").write_text("mine")
    remove_checkpoint(saved)
    assert [p.name for p in saved.iterdir()] == ["notes.txt"]
    (saved / "notes.txt").unlink()
    remove_checkpoint(saved)
    remove_checkpoint(saved)
    assert not saved.exists()


def test_a_setting_younger_than_a_checkpoint_has_its_default(tmp_path: Path) -> None:
    older = replace(SPECIFICATION, method={n: v for n, v in TABLE.items() if n != "learn_psi_r"})
    save_checkpoint(tmp_path, older, state())
    assert load_checkpoint(tmp_path)[0] == SPECIFICATION


def test_a_correction_older_than_profiles_is_read_as_it_was(tmp_path: Path) -> None:
    whole = uncorrected(SPEC.classes)
    older = {n: t for n, t in whole.items() if n not in ("profile", "typical")}
    save_checkpoint(tmp_path, SPECIFICATION, replace(state(), correction=older))
    assert load_checkpoint(tmp_path)[1].correction.keys() == older.keys()
    half = older | {"profile": whole["profile"]}
    save_checkpoint(tmp_path, SPECIFICATION, replace(state(), correction=half))
    with pytest.raises(CheckpointError, match="it has no 'correction/typical'"):
        load_checkpoint(tmp_path)


def test_a_newer_checkpoint_replaces_the_older_one(saved: Path) -> None:
    save_checkpoint(saved, SPECIFICATION, state(4))
    assert load_checkpoint(saved)[1].round == 4
    assert len(list(saved.iterdir())) == 2


def test_tensors_that_a_killed_writer_left_are_deleted(saved: Path) -> None:
    left = saved / "round-2-0123abcd.safetensors"
    left.write_bytes(b"older")
    remove_old_tensors(saved)
    assert not left.exists() and same(load_checkpoint(saved)[1], state())


def test_neither_theta_0_nor_p_is_stored(saved: Path) -> None:
    size = sum(f.stat().st_size for f in saved.iterdir())
    psi = sum(p.numel() for p in state().psi.values())
    assert size < 4 * 3 * psi + 20_000  # psi and Adam's two moments
    told = json.loads((saved / "checkpoint.json").read_text())["federation"]
    assert told["expansion_sha256"] == FLOWDUP.fingerprint and told["seed"] == 7
    assert told["shapes"]["psi/psi_r"] == [60] and told["shapes"]["theta/0.weight"] == [16, 1, 3, 3]


@pytest.mark.parametrize("name", METHODS)
def test_shapes_and_the_order_of_names_are_those_of_init(name: str) -> None:
    m = method(name)
    psi = m.init(STREAM)
    spec = FederationSpec.of(7, "cnn-small", METHODS[name], SPEC, m)
    assert spec.psi_names == list(psi)
    assert all(spec.shapes[f"psi/{n}"] == list(p.shape) for n, p in psi.items())


def draws(work: Callable[[], object]) -> int:
    """How often the generator is called."""
    calls = []

    def watch(frame: FrameType, event: str, _: object) -> None:
        if event == "call" and frame.f_code is philox.__code__:
            calls.append(frame)

    sys.setprofile(watch)
    try:
        work()
    finally:
        sys.setprofile(None)
    return len(calls)


@pytest.mark.parametrize("name", METHODS)
def test_a_federation_is_described_and_checked_without_drawing_a_number(name: str) -> None:
    m = method(name)
    spec = FederationSpec.of(7, "cnn-small", METHODS[name], SPEC, m)
    assert draws(lambda: FederationSpec.of(7, "cnn-small", METHODS[name], SPEC, m)) == 0
    assert draws(lambda: spec.check(m)) == 0
    assert (draws(lambda: m.init(STREAM)) > 0) == (name != "ld-fedavg")  # which starts at v = 0


def test_a_run_is_continued_without_drawing_psi_again(tmp_path: Path) -> None:
    table = {"model": "mlp", "method": METHODS["pefll"], "server": {"rounds": 1, "cohort": 2}}
    config = read_config(table)
    list(train_run(config, tmp_path, population=population()))
    simulation = Simulation(config, population())
    assert draws(lambda: simulation.load_state(tmp_path / "checkpoint")) == 0
    assert draws(simulation.initial_state) > 0


@settings(max_examples=150)
@given(st.data())
def test_one_flipped_bit_anywhere_is_found(data: st.DataObject) -> None:
    folder = _shared()
    path = data.draw(st.sampled_from(sorted(folder.iterdir())))
    whole = path.read_bytes()
    place, bit = data.draw(st.integers(0, len(whole) - 1)), data.draw(st.integers(0, 7))
    changed = bytearray(whole)
    changed[place] ^= 1 << bit
    path.write_bytes(changed)
    try:
        with pytest.raises(CheckpointError, match="restore the folder"):
            load_checkpoint(folder)
    finally:
        path.write_bytes(whole)


@settings(max_examples=50)
@given(st.data())
def test_a_truncated_file_is_found(data: st.DataObject) -> None:
    folder = _shared()
    path = data.draw(st.sampled_from(sorted(folder.iterdir())))
    whole = path.read_bytes()
    path.write_bytes(whole[: data.draw(st.integers(0, len(whole) - 1))])
    try:
        with pytest.raises(CheckpointError, match="restore the folder"):
            load_checkpoint(folder)
    finally:
        path.write_bytes(whole)


def _shared(made: list[Path] = []) -> Path:  # noqa: B006  (one folder for all examples)
    if not made:
        made.append(Path(tempfile.mkdtemp()))
        save_checkpoint(made[0], SPECIFICATION, state())
    return made[0]


def test_a_missing_tensor_file_is_found(saved: Path) -> None:
    next(saved.glob("*.safetensors")).unlink()
    with pytest.raises(CheckpointError, match="cannot read"):
        load_checkpoint(saved)


def test_a_folder_without_a_checkpoint_says_train_first(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="train first"):
        load_checkpoint(tmp_path)


def test_another_expansion_than_the_recorded_one_is_refused(saved: Path) -> None:
    save_checkpoint(saved, replace(SPECIFICATION, expansion_sha256="0" * 64), state())
    with pytest.raises(CheckpointError, match="another expansion"):
        load(saved)
    save_checkpoint(saved, replace(SPECIFICATION, seed=8), state())
    with pytest.raises(CheckpointError, match="another expansion"):
        load(saved)


def test_another_definition_of_the_model_is_refused(saved: Path) -> None:
    """psi would fit nothing, or, worse, silently fit a part."""
    shapes = dict(SPECIFICATION.shapes)
    shapes["theta/other.weight"] = shapes.pop("theta/0.weight")
    save_checkpoint(saved, replace(SPECIFICATION, shapes=shapes), state())
    with pytest.raises(CheckpointError, match="defined otherwise"):
        load(saved)


def test_a_reader_beside_a_run_that_goes_on_always_finds_a_checkpoint(tmp_path: Path) -> None:
    save_checkpoint(tmp_path, SPECIFICATION, state(0))
    stop = threading.Event()

    def write() -> None:
        number = 0
        while not stop.is_set():
            number += 1
            save_checkpoint(tmp_path, SPECIFICATION, state(number))

    writer = threading.Thread(target=write)
    writer.start()
    try:
        rounds = [load_checkpoint(tmp_path)[1].round for _ in range(100)]
    finally:
        stop.set()
        writer.join()
    assert rounds == sorted(rounds)


def test_numbers_that_are_not_finite_are_never_stored(saved: Path) -> None:
    broken = state(9)
    broken.psi["psi_r"][0] = float("nan")
    with pytest.raises(TrainingError, match="diverged by round 9"):
        save_checkpoint(saved, SPECIFICATION, broken)
    assert load_checkpoint(saved)[1].round == 3


def test_a_full_disk_is_one_sentence_and_the_old_checkpoint_stays(saved: Path) -> None:
    """The system refuses to let any file grow beyond 4 kB while the next checkpoint is written."""
    before = {f.name: f.read_bytes() for f in saved.iterdir()}
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, limits[1]))
    try:
        with pytest.raises(FlowdupError, match=r"could not write .* intact"):
            save_checkpoint(saved, SPECIFICATION, state(4))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert {f.name: f.read_bytes() for f in saved.iterdir()} == before
    assert load_checkpoint(saved)[1].round == 3


def test_a_writer_killed_again_and_again_leaves_a_whole_checkpoint(tmp_path: Path) -> None:
    code = (
        "import sys; sys.path.insert(0, sys.argv[1])\n"
        "import test_checkpoint as t\n"
        "from pathlib import Path\n"
        "for i in range(10**6):\n"
        "    t.save_checkpoint(Path(sys.argv[2]), t.SPECIFICATION, t.state(i))\n"
        "    print(i, flush=True)\n"
    )
    tests = str(Path(__file__).parent)
    for after in (1, 4, 9):
        with subprocess.Popen(
            [sys.executable, "-c", code, tests, str(tmp_path)], stdout=subprocess.PIPE, text=True
        ) as process:
            assert process.stdout is not None
            seen = [int(process.stdout.readline()) for _ in range(after)]
            process.kill()
        assert load_checkpoint(tmp_path)[1].round >= seen[-1]


def test_a_checkpoint_of_another_format_is_refused_by_its_number(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All else is right: seal, names, shapes.  It says which flowdup to use."""
    with monkeypatch.context() as later:
        later.setattr("flowdup.checkpoint.FORMAT", 99)
        save_checkpoint(tmp_path, SPECIFICATION, state())
    with pytest.raises(CheckpointError, match="format 99"):
        load_checkpoint(tmp_path)


REPLACING: list[Callable[[], None]] = []  # what happens just before tensors are opened, in turn


def _replace_before_open(event: str, arguments: tuple[object, ...]) -> None:
    if event == "open" and REPLACING and str(arguments[0]).endswith(".safetensors"):
        REPLACING.pop(0)()


sys.addaudithook(_replace_before_open)  # for as long as this process lives; idle when empty


@pytest.mark.parametrize("times", [1, 2])
def test_a_reader_between_header_and_tensors_finds_what_a_writer_put_there(
    saved: Path, times: int
) -> None:
    """A run saves its next rounds at the moment when the tensors of round 3 would be opened."""

    def save(round: int) -> None:
        waiting, REPLACING[:] = REPLACING[:], []  # the writer's own files are not in question
        save_checkpoint(saved, SPECIFICATION, state(round))
        REPLACING[:] = waiting

    REPLACING.extend(partial(save, 4 + i) for i in range(times))
    loaded = load_checkpoint(saved)[1]
    assert not REPLACING
    assert same(loaded, state(3 + times))
