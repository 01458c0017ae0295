"""Tables in TOML files: what they stand for, who shares a run, which setting is chosen."""

import json
import math
from dataclasses import replace
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import pytest
from records import record

from flowdup.campaign import Records, collect, experiment_names, load_experiment, plan
from flowdup.campaign.cells import Experiment
from flowdup.campaign.experiment import read_experiment
from flowdup.campaign.identity import deciding_settings, identity
from flowdup.campaign.records import by_support
from flowdup.campaign.selection import choose
from flowdup.config import Config, load_config, parse_toml
from flowdup.errors import CheckpointError, ConfigError
from flowdup.methods import METHODS
from flowdup.models import MODELS

ROOT = Path(__file__).parents[2]
NAMES = sorted(path.stem for path in (ROOT / "experiments").glob("*-*.toml"))
TABLES = [n for n in NAMES if "rows" in parse_toml((ROOT / f"experiments/{n}.toml").read_text())]
SMALL = """
title = "Small"
preset = "digits"
seeds = [0, 1, 2]
reference = "one"
[columns]
"p = 0.5" = { data = { labeled_fraction = 0.5 } }
[rows.one]
search = { "client.optimizer.lr" = [0.1, 0.2] }
paper = [[66.1, 1.5]]
[rows.two]
settings = { method = { name = "fedavg" } }
search = { "client.optimizer.lr" = [0.1, 0.2] }
"""


def small(change: str = "", to: str = "") -> Experiment:
    assert change in SMALL
    return read_experiment("small", parse_toml(SMALL.replace(change, to, 1) if change else SMALL))


def test_a_run_is_known_by_its_settings_and_not_by_where_it_is_computed() -> None:
    config = load_config("digits")
    elsewhere = replace(
        config,
        engine=replace(config.engine, device="cuda", precision="bf16"),
        run=replace(config.run, checkpoint_every=7, false_alarms=0.0, log=("tensorboard",)),
    )
    assert identity(deciding_settings(elsewhere)) == identity(deciding_settings(config))
    for other in (
        load_config("digits", ["seed=1"]),
        load_config("digits", ["client.optimizer.lr=0.04"]),
        load_config("digits", ["run.evaluate_every=10"]),
        load_config("digits", ["method.name=pefll"]),
    ):
        assert identity(deciding_settings(other)) != identity(deciding_settings(config))


def test_a_setting_that_is_younger_than_a_record_counts_as_its_default() -> None:
    settings = deciding_settings(load_config("digits"))
    older = json.loads(json.dumps(settings))
    del older["data"]["dirichlet"], older["method"]["hypernetwork"]["layers"]
    assert identity(older) == identity(settings)
    older["data"]["dirichlet"] = 0.5
    assert identity(older) != identity(settings)


@pytest.mark.parametrize("name", TABLES)
def test_a_table_expands_into_valid_runs(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    table = load_experiment(name)
    assert len(table.cells) == len(table.rows) * len(table.columns)
    assert len({len(cell.candidates) for cell in table.cells}) == 1 or table.unequal
    for cell in table.cells:
        digests = {run.digest for c in cell.candidates for run in c.runs.values()}
        assert len(digests) == len(cell.candidates) * len({*cell.seeds, *table.search_seeds})
        for candidate in cell.candidates:
            config = candidate.runs[cell.seeds[0]].config
            assert config.method.name in METHODS
            assert {config.model, *filter(None, [_backbone(config)])} <= set(MODELS)
            assert getattr(config.method.settings, "batch_size", config.client.batch_size) == (
                config.client.batch_size
            )
        assert cell.paper is None or all(map(math.isfinite, cell.paper))


def _backbone(config: Config) -> str:
    hypernetwork = getattr(config.method.settings, "hypernetwork", None)
    return hypernetwork.backbone if hypernetwork else ""


def test_there_are_the_nine_tables_of_the_paper_and_its_figure(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(ROOT)
    assert set(experiment_names()) == set(TABLES)
    papers = [load_experiment(name) for name in TABLES if name.startswith("paper-")]
    assert sum(cell.paper is not None for table in papers for cell in table.cells) == 138
    assert any(cell.embedded for table in papers for cell in table.cells)


def test_tables_share_the_runs_of_cells_that_are_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    main = _digests(load_experiment("paper-cifar10-cnn"))
    assert _digests(load_experiment("paper-subspace-dimension", rows="k = 10000")) <= main
    assert not _digests(load_experiment("paper-subspace-dimension", rows="k = 200")) & main
    assert _digests(load_experiment("question-worst-decile")) <= main


def _digests(table: Experiment) -> set[str]:
    candidates = [candidate for cell in table.cells for candidate in cell.candidates]
    return {run.digest for candidate in candidates for run in candidate.runs.values()}


def test_the_setting_is_chosen_by_validation_clients_of_the_search_seed_alone() -> None:
    table = small()
    cell = table.cells[0]
    low, high = cell.candidates
    records = Records(Path("nothing"))
    assert not choose(table, cell, records).complete
    records.add(record(low.runs[0].config, 60.0, test=90.0))  # better on test clients
    records.add(record(low.runs[1].config, 99.0, test=99.0))  # and with other seeds
    assert choose(table, cell, records).candidate is None  # not all have been tried
    records.add(record(high.runs[0].config, 61.0))
    choice = choose(table, cell, records)
    assert choice.candidate == high
    assert [tried["validation"] for tried in choice.tried] == [60.0, 61.0]
    wanted = plan([table], records).missing
    assert wanted[high.runs[0].digest].evaluate
    assert low.runs[2].digest not in wanted


def test_a_choice_stays_when_its_run_is_done_again_and_evaluated(tmp_path: Path) -> None:
    table = small()
    cell = table.cells[0]
    low, high = cell.candidates
    records = Records(tmp_path / "runs.jsonl")
    records.add(record(low.runs[0].config, 60.0))
    records.add(record(high.runs[0].config, 61.0))
    records.add(record(high.runs[0].config, 59.0, test=58.0))  # rounded otherwise, on a GPU
    records.save()
    again = Records.read(records.path)
    assert choose(table, cell, again).candidate == high
    assert [tried["validation"] for tried in choose(table, cell, again).tried] == [60.0, 61.0]
    found = again.get(high.runs[0])
    assert found and found["validation"] == 59.0  # of the model that was evaluated


def _two_columns(more: str = "") -> str:
    """SMALL with a second column, and more before its columns."""
    column = '"p = 0.3" = { data = { labeled_fraction = 0.3 } }\n'
    text = SMALL.replace("[columns]\n", f"{more}\n[columns]\n{column}")
    return text.replace("paper = [[66.1, 1.5]]\n", "")


def test_with_a_search_column_its_search_decides_for_the_whole_row() -> None:
    each, all_in_one = (
        read_experiment("small", parse_toml(_two_columns(more)))
        for more in ("", 'search_column = "p = 0.3"')
    )
    cell, own = (
        next(c for c in table.cells if c.column != "p = 0.3") for table in (all_in_one, each)
    )
    decider = all_in_one.decider(cell)
    assert (decider.row, decider.column) == (cell.row, "p = 0.3")
    records = Records(Path("nothing"))
    nothing = [set(plan([t], records).missing) for t in (all_in_one, each)]
    assert len(nothing[0]) < len(nothing[1])
    for candidate, here, there in zip(cell.candidates, (9.0, 8.0), (1.0, 2.0), strict=True):
        records.add(record(candidate.runs[0].config, here))
        same = next(c for c in decider.candidates if c.searched == candidate.searched)
        records.add(record(same.runs[0].config, there))
    assert choose(each, own, records).candidate == cell.candidates[0]
    assert choose(all_in_one, cell, records).candidate == cell.candidates[1]


def test_a_row_may_be_searched_elsewhere_than_its_table() -> None:
    text = _two_columns('search_column = "p = 0.3"')
    for own, decides in (("", "p = 0.5"), ("p = 0.5", "p = 0.5")):
        changed = text.replace("[rows.two]", f'[rows.two]\nsearch_column = "{own}"')
        table = read_experiment("small", parse_toml(changed))
        cells = collect(table, Records(Path("nothing")))["cells"]
        searched_in = {(c["row"], c["column"]): c["searched_in"] for c in cells}
        assert searched_in == {
            ("one", "p = 0.3"): "p = 0.3",
            ("one", "p = 0.5"): "p = 0.3",
            ("two", "p = 0.3"): own or "p = 0.3",
            ("two", "p = 0.5"): decides,
        }
    with pytest.raises(ConfigError, match="search_column must be one of its columns"):
        read_experiment(
            "small", parse_toml(text.replace("[rows.two]", '[rows.two]\nsearch_column = "p"'))
        )


def test_a_setting_that_diverged_is_not_chosen_and_not_tried_again() -> None:
    table = small()
    cell = table.cells[0]
    low, high = (candidate.runs[0].config for candidate in cell.candidates)
    records = Records(Path("nothing"), [record(high, 10.0)])
    records.add({"settings": deciding_settings(low), "failed": "training diverged"})
    assert choose(table, cell, records).candidate == cell.candidates[1]
    assert cell.candidates[0].runs[0].digest not in plan([table], records).missing


def test_differences_to_the_reference_are_paired_by_seed() -> None:
    table = small()
    records = Records(Path("nothing"))
    for cell, values in zip(table.cells, ([50.0, 60.0, 70.0], [53.0, 61.0, 78.0]), strict=True):
        records.add(record(cell.candidates[1].runs[0].config, 1.0))
        for seed, value in enumerate(values):
            records.add(record(cell.candidates[0].runs[seed].config, 2.0, value))
    one, two = collect(table, records)["cells"]
    assert (one["mean"], one["std"], one["paper_mean"]) == (60.0, 10.0, 66.1)
    assert "difference" not in one
    assert two["difference"]["accuracy"]["mean"] == 4.0  # 3, 1 and 8
    assert two["difference"]["accuracy"]["standard_error"] == pytest.approx(math.sqrt(13 / 3))
    assert two["worst_decile"] == 54.0
    assert two["paper_mean"] is None
    assert two["settings"]["method"] == {"name": "fedavg"}


def test_of_two_records_of_a_run_the_one_that_was_evaluated_stays(tmp_path: Path) -> None:
    config = load_config("digits")
    here, there = tmp_path / "here.jsonl", tmp_path / "there.jsonl"
    Records(here, [record(config, 60.0)]).save()
    Records(there, [record(config, 61.0, 70.0), record(replace(config, seed=1), 3.0)]).save()
    merged = Records.read(here)
    assert merged.merge([Records.read(there)]) == 2
    assert merged.merge([Records.read(there)]) == 0
    merged.merge([Records(here, [record(config, 62.0, 80.0)])])  # the first one stands
    (found,) = (r for r in merged.by_digest.values() if r["settings"]["seed"] == 0)
    assert (found["validation"], found["test"]["held_out"]["accuracy"]["mean"]) == (61.0, 70.0)


def test_numbers_of_points_that_several_tables_ask_for_are_joined(tmp_path: Path) -> None:
    def supported(*points: int) -> dict[str, Any]:
        rows = [{"points": n, "metrics": {"accuracy": {"mean": 1.0}}} for n in points]
        return record(load_config("digits"), 60.0, 70.0) | {"support": rows}

    records = Records(tmp_path / "runs.jsonl", [supported(1, 5), supported(25, 5)])
    (found,) = records.by_digest.values()
    assert list(by_support(found)) == [1, 5, 25]


def test_a_record_that_another_process_saved_meanwhile_is_kept(tmp_path: Path) -> None:
    path, config = tmp_path / "runs.jsonl", load_config("digits")
    mine = Records(path, [record(config, 60.0)])
    Records(path, [record(replace(config, seed=1), 3.0)]).save()
    mine.save()
    assert len(Records.read(path).by_digest) == 2


def _save_often(path: Path, first: int) -> None:
    config = load_config("digits")
    for seed in range(first, first + 30):
        Records(path, [record(replace(config, seed=seed), 60.0)]).save()


def test_processes_that_save_at_the_same_time_lose_no_record(tmp_path: Path) -> None:
    path = tmp_path / "new folder" / "runs.jsonl"
    spawn = get_context("spawn")
    others = [spawn.Process(target=_save_often, args=(path, 100 * n)) for n in range(3)]
    for other in others:
        other.start()
    for other in others:
        other.join()
    assert len(Records.read(path).by_digest) == 90
    assert [file.name for file in path.parent.iterdir()] == ["runs.jsonl"]


WRONG_TEST = '{"settings": {}, "validation": 1.0, "test": {"held_out": 3}}'
HALF = '{"accuracy": {"mean": 1.0, "worst_decile": null}}'
WRONG_SUPPORT = (
    '{"settings": {}, "validation": 1.0, "support": [{"points": 3}], '
    f'"test": {{"held_out": {HALF}, "transductive": {HALF}}}}}'
)
LINES = ["{}", "[]", '{"settings": {}}', '{"settings": 3}', "nothing", WRONG_TEST, WRONG_SUPPORT]


def test_clients_of_one_point_have_no_other_half_and_a_record_all_the_same(tmp_path: Path) -> None:
    table = small()
    records = Records(tmp_path / "runs.jsonl")
    for cell in table.cells:
        records.add(record(cell.candidates[1].runs[0].config, 1.0))
        found = record(cell.candidates[0].runs[0].config, 2.0, 70.0)
        found["test"] |= {"held_out": {"accuracy": {"mean": None, "worst_decile": None}}}
        records.add(found)
        records.save()
    one, two = collect(table, Records.read(tmp_path / "runs.jsonl"))["cells"]
    assert one["mean"] == 70.0 and one["held_out"] is None
    assert two["difference"]["held_out"]["mean"] is None


@pytest.mark.parametrize("line", LINES)
def test_a_damaged_file_of_records_is_refused(line: str, tmp_path: Path) -> None:
    (tmp_path / "runs.jsonl").write_text(f"{line}\n")
    with pytest.raises(CheckpointError, match=r"line 1 of .*runs\.jsonl is no record of a run"):
        Records.read(tmp_path / "runs.jsonl")


@pytest.mark.parametrize(
    ("change", "to", "clue"),
    [
        ("seeds =", "sedes =", "unknown key 'sedes' .did you mean 'seeds'"),
        ("[0, 1, 2]", "[0, 0]", "must be different whole numbers"),
        ("0.5 }", "5 }", "labeled_fraction"),
        ('"fedavg"', '"fedavgg"', "fedavgg"),
        ("[0.1, 0.2]", "[0.1]", "have 1 or 2 settings to choose from"),
        ("[[66.1, 1.5]]", "[[66.1]]", "pairs like"),
        ("[[66.1, 1.5]]", "[]", "0 entries for 1 columns"),
        ('"one"', '"three"', "reference must be one of its rows"),
        ('preset = "digits"', "", "needs a preset, columns and rows"),
        ("[rows.two]", '[rows."two, too"]', "rows, so none has one: rename it"),
        ("[columns]\n", '[columns]\n"a, b" = {}\n', "columns, so none has one: rename it"),
        ("[0.1, 0.2]", "0.1", "needs a list of values"),
        ("[columns]", 'show = "best"\n[columns]', "show must be one of"),
        ("[columns]", "search_seeds = [9]\n[columns]", "must be some of its seeds"),
        ("[columns]", "support = [0]\n[columns]", "numbers of points"),
        ("0.5 }", "0.5 }, preset = 3", r"columns\.p = 0\.5\.preset must be a text"),
    ],
)
def test_a_table_with_a_mistake_is_refused_in_a_sentence(change: str, to: str, clue: str) -> None:
    with pytest.raises(ConfigError, match=clue):
        small(change, to)


def test_a_row_may_have_seeds_of_its_own() -> None:
    table = small("[rows.one]", "[rows.one]\nseeds = [0, 1, 2, 3, 4]")
    assert {cell.row: cell.seeds for cell in table.cells} == {
        "one": (0, 1, 2, 3, 4),
        "two": (0, 1, 2),
    }
    needed = plan([table], Records(Path("none"))).known.values()
    assert {need.run.config.seed for need in needed} == {0}  # settings are not chosen yet
    first = Records(Path("none"))
    for cell in table.cells:
        for candidate in cell.candidates:
            first.add(record(candidate.runs[0].config, 50.0))
    later = [need.run.config for need in plan([table], first).missing.values()]
    assert sorted(config.seed for config in later) == [0, 0, 1, 1, 2, 2, 3, 4]
    with pytest.raises(ConfigError, match=r"rows\.one\.seeds must be different whole numbers"):
        small("[rows.one]", "[rows.one]\nseeds = [1, 1]")


def test_a_column_may_have_a_preset_of_its_own() -> None:
    change, line = '"p = 0.5" = {', '"p = 0.5" = { preset = "rotated-mnist", '
    (cell,) = (cell for cell in small(change, line).cells if cell.row == "two")
    config, preset = cell.candidates[0].runs[0].config, load_config("rotated-mnist")
    assert (config.model, config.data.points) == (preset.model, preset.data.points)
    assert (config.method.name, config.data.labeled_fraction) == ("fedavg", 0.5)  # on top of it
    with pytest.raises(ConfigError, match="unknown preset 'rotated-mist'"):
        small(change, line.replace("mnist", "mist"))


def test_a_row_may_be_like_one_of_another_file(tmp_path: Path) -> None:
    (tmp_path / "small.toml").write_text(SMALL)
    text = SMALL[: SMALL.index("[rows.one]")] + (
        '[rows.one]\nlike = "small/one"\n'
        '[rows.other]\nlike = "small/two"\nsettings = { server = { cohort = 7 } }\n'
    )
    (tmp_path / "more.toml").write_text(text)
    more = load_experiment(str(tmp_path / "more.toml"))
    one, other = more.cells
    assert one.candidates == small().cells[0].candidates
    assert one.paper is None
    assert {c.runs[0].config.method.name for c in other.candidates} == {"fedavg"}
    assert {c.runs[0].config.server.cohort for c in other.candidates} == {7}
    assert len(other.candidates) == 2
    (tmp_path / "more.toml").write_text(text.replace("small/two", "small/three"))
    with pytest.raises(ConfigError, match="has no row 'three'"):
        load_experiment(str(tmp_path / "more.toml"))


def test_a_row_may_have_what_another_table_chose(tmp_path: Path) -> None:
    main = SMALL.replace("[columns]", 'search_column = "p = 0.5"\n[columns]')
    (tmp_path / "small.toml").write_text(main)
    head = SMALL[: SMALL.index("[rows.one]")].replace("0.5", "0.3")
    text = head + '[rows.one]\nchosen = "small/one"\n[rows.other]\nchosen = "small/two"\n'
    (tmp_path / "more.toml").write_text(text)
    there, more = (load_experiment(str(tmp_path / f"{n}.toml")) for n in ("small", "more"))
    searched, (own, _) = there.cells[0].candidates, more.cells
    nothing = Records(Path("nothing"))
    assert set(plan([more], nothing).known) == set(plan([there], nothing).known)  # 4 to be tried
    records = Records(Path("nothing"), [record(searched[0].runs[0].config, 60.0)])
    records.add(record(searched[1].runs[0].config, 61.0))
    assert choose(more, own, records).candidate == own.candidates[1]
    wanted = plan([more], records).missing
    assert {own.candidates[1].runs[s].digest for s in (0, 1, 2)} <= set(wanted)
    assert not {own.candidates[0].runs[s].digest for s in (0, 1, 2)} & set(wanted)
    for change, to, clue in (
        (
            'chosen = "small/one"',
            'chosen = "small/one"\nlike = "small/two"',
            "as 'like' or as 'chosen'",
        ),
        ('chosen = "small/one"', "chosen = 7", "needs a text TABLE/ROW"),
        ("small/two", "small/three", "has no row 'three'"),
        ("[0, 1, 2]", "[1, 0, 2]", "and the same search_seeds"),
        ('"small/two"\n', '"small/two"\nsearch = { seed = [1, 2] }\n', "no search of its own"),
        ('"small/two"\n', '"small/two"\nsearch_column = "p = 0.3"\n', "no search of its own"),
    ):
        (tmp_path / "more.toml").write_text(text.replace(change, to))
        with pytest.raises(ConfigError, match=clue):
            load_experiment(str(tmp_path / "more.toml"))
    (tmp_path / "more.toml").write_text(text)
    (tmp_path / "small.toml").write_text(_two_columns())
    with pytest.raises(ConfigError, match="that row needs one search_column"):
        load_experiment(str(tmp_path / "more.toml"))


@pytest.mark.parametrize("name", TABLES)
def test_results_are_what_the_records_say(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    file = Path(f"results/{name}.json")
    table = collect(load_experiment(name), Records.read(Path("results/runs.jsonl")))
    if not file.exists():
        means = [cell["mean"] for cell in table["cells"]]
        assert not any(means), f"there are runs of it: `flowdup reproduce {name}`"
        return
    stored = json.loads(file.read_bytes())
    stored.pop("silhouette", None)
    assert stored == json.loads(json.dumps(table)), f"stale: `flowdup reproduce {name}`"
