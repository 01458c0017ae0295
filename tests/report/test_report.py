import json
import math
import re
import subprocess
import sys
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest
from pages import Page

from flowdup.errors import CheckpointError, FlowdupError
from flowdup.report import RunContents, embedding_figure, page
from flowdup.report.chart import histogram, line_chart, nice_step, rounded_axis
from flowdup.run import write_report

HOSTILE = '<script src="http://evil.example/x.js">alert("&")</script>'


def rounds(count: int, every: int) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    for r in range(1, count + 1):
        rows.append({"round": r, "loss": 2 / r, "seconds": 1.5 * r})
        if r % every == 0:
            rows[-1]["validation_accuracy"] = 50 + 40 * (1 - 1 / r)
            rows[-1]["validation_worst_decile"] = 30.0 + r
    return rows


def write_metrics(folder: Path, rows: list[dict[str, Any]], tail: str = "") -> None:
    text = "".join(json.dumps(row) + "\n" for row in rows)
    (folder / "metrics.jsonl").write_text(text + tail)


def client(i: int, **more: Any) -> dict[str, Any]:
    traits = {"rotation": 90 * (i % 4), "id": i}
    own = {"transductive": {"accuracy": 60.0 + i}, "held_out": {"accuracy": 50.0 + i}}
    return {"name": f"c{i}", "traits": traits, "points": 20, "metrics": own, **more}


def summary(mean: float, std: float, worst_decile: float, worst: float) -> dict[str, float]:
    return {"mean": mean, "std": std, "worst_decile": worst_decile, "worst": worst}


def write_evaluation(folder: Path, clients: list[dict[str, Any]], **more: Any) -> None:
    metrics = {
        "transductive": {
            "accuracy": summary(71.5, 6.9, 61.0, 60.0),
            "nll": summary(0.1234, 0.5, 1.75, 2.0),
            "of_my_own": summary(7.0, 1.0, 3.0, 2.0),
        },
        "held_out": {"accuracy": summary(61.5, 6.9, 51.0, 50.0), "nll": dict.fromkeys("ab")},
    }
    content = {"metrics": metrics, "clients": clients, "method": "flowdup", "round": 20, **more}
    (folder / "evaluation.json").write_text(json.dumps(content))


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A finished and evaluated run with a figure."""
    (tmp_path / "config.toml").write_text(
        'seed = 3\n\n[method]\nname = "flowdup"\n\n[data]\nsource = "digits"\n'
    )
    write_metrics(tmp_path, rounds(20, 5))
    write_evaluation(tmp_path, [client(i) for i in range(24)])
    figure = '<svg xmlns="http://www.w3.org/2000/svg"><script>alert(1)</script></svg>'
    (tmp_path / "embedding.svg").write_text(figure)
    return tmp_path


def test_privacy_bytes_and_refusals_stand_in_the_headline(tmp_path: Path) -> None:
    rows = rounds(4, 2)
    for row in rows:
        row |= {"epsilon": 0.5 * row["round"], "refused": row["round"] % 2}
        row |= {"bytes_up_per_client": 857_000, "bytes_down_per_client": 2_437_500 * row["round"]}
    write_metrics(tmp_path, rows)
    text = write_report(tmp_path).read_text()
    assert ">Epsilon</dt>" in text and ">2</dd>" in text
    assert ">Refused replies</dt>" in text and "in 2 rounds" in text
    assert ">MB up</dt>" in text and ">0.857</dd>" in text and ">6.094</dd>" in text
    write_metrics(tmp_path, rounds(4, 2))
    assert "Epsilon" not in write_report(tmp_path).read_text()


def test_the_page_needs_nothing_but_itself(run: Path) -> None:
    Page(write_report(run)).check_alone()


def test_the_headline_tells_method_data_rounds_and_accuracies(run: Path) -> None:
    write_metrics(run, [*rounds(20, 5), {"round": 21, "loss": 0.1, "validation_accuracy": 70.04}])
    text = Page(write_report(run)).text
    assert "flowdup on digits" in text
    assert "70.0 %\nbest 88.0 % at round 20" in text
    assert "71.5 %\nworst decile 61.0 %; 24 clients, round 20" in text
    assert "61.5 %\nworst decile 51.0 %; 24 clients, round 20" in text
    assert "Worst decile of clients: 50.0 % at round 20." in text


def test_clients_without_labels_are_not_counted_as_scored(run: Path) -> None:
    silent = client(23, metrics={"transductive": {}, "held_out": {}})
    write_evaluation(run, [*(client(i) for i in range(23)), silent])
    text = re.sub(r"\n+", " ", Page(write_report(run)).text)
    assert "71.5 % worst decile 61.0 %; 23 of 24 clients, round 20" in text
    assert "180 6 " in text and "270 5 of 6 " in text


def test_the_best_round_is_one_of_the_last_stage_or_its_start(run: Path) -> None:
    last = {"round": 21, "stage": 1, "loss": 0.1, "validation_accuracy": 70.04}
    write_metrics(run, [*rounds(20, 5), last])
    assert "70.0 %\nbest 70.0 % at round 21" in Page(write_report(run)).text
    write_metrics(run, [*rounds(20, 5), last | {"start_accuracy": 75.04}])
    assert "70.0 %\nbest 75.0 % at round 20" in Page(write_report(run)).text


def test_metrics_of_test_clients_are_told_with_mean_and_worst_decile(run: Path) -> None:
    text = re.sub(r"\n+", " ", Page(write_report(run)).text)
    assert "mean deviation worst decile worst accuracy (%) 71.5 6.9 61.0 60.0" in text
    assert "negative log-likelihood (nats, lower is better) 0.123 0.500 1.750 2.000" in text
    assert "of my own 7.000 1.000 3.000 2.000" in text  # registered elsewhere, perhaps
    assert text.count("negative log-likelihood") == 1  # the other reading knows nothing of it


def test_an_evaluation_of_an_older_kind_is_left_out_of_the_page(run: Path) -> None:
    older = {"accuracy": {"transductive": 71.5}, "clients": [{"name": "a", "transductive": 50.0}]}
    (run / "evaluation.json").write_text(json.dumps(older))
    assert "Test" not in Page(write_report(run)).text


def test_curves_have_a_vertex_per_round_and_per_evaluation(run: Path) -> None:
    loss, accuracy = Page(write_report(run)).of_class("line")
    assert len((loss["points"] or "").split()) == 20
    assert len((accuracy["points"] or "").split()) == 4


def test_a_long_loss_curve_keeps_its_vertices_under_its_running_mean(run: Path) -> None:
    write_metrics(run, rounds(300, 50))
    page = Page(write_report(run))
    assert [len((c["points"] or "").split()) for c in page.of_class("line")] == [300, 6]
    assert [len((c["points"] or "").split()) for c in page.of_class("trend")] == [300]


def test_every_client_stands_in_a_bar_and_the_ends_are_named(run: Path) -> None:
    page = Page(write_report(run))
    counts = [int(n) for n in re.findall(r"\d+ to \d+ %: (\d+)", page.text)]
    assert sum(counts) == 2 * 24  # transductive and held out
    assert "Worst 50.0 % (c0), median 61.5 %, best 73.0 % (c23)" in page.text


def test_accuracy_is_told_by_traits_of_few_values_only(run: Path) -> None:
    page = Page(write_report(run))
    assert page.count("table") == 2 + 1  # metrics in both readings
    assert "by rotation" in page.text and "by id" not in page.text
    assert re.search(r"270\s*6\s*73\.0", page.text)


def test_clients_without_labels_are_left_out_of_histograms_and_means(run: Path) -> None:
    write_evaluation(
        run,
        [
            client(0),
            client(1, metrics={"transductive": {}, "held_out": {}}),
            client(4, metrics={"transductive": {"accuracy": 3.0}, "held_out": {}}),
        ],
    )
    counts = [int(n) for n in re.findall(r"\d+ to \d+ %: (\d+)", Page(write_report(run)).text)]
    assert sum(counts) == 2 + 1


def test_text_from_files_is_escaped(tmp_path: Path) -> None:
    folder = tmp_path / "<b>run"
    folder.mkdir()
    quoted = HOSTILE.replace('"', '\\"')
    (folder / "config.toml").write_text(f'[data]\nsource = "{quoted}"\n')
    write_metrics(folder, rounds(3, 1))
    clients = [client(i, name=HOSTILE, traits={HOSTILE: f"{HOSTILE}{i % 2}"}) for i in range(6)]
    write_evaluation(folder, clients, method=HOSTILE)
    page = Page(write_report(folder))
    assert page.count("script") == page.count("b") == 0
    assert page.text.count(HOSTILE) >= 8  # shown as text: method, source, names, trait, values


def test_a_hostile_figure_stays_an_image(run: Path) -> None:
    page = Page(write_report(run))
    assert page.count("img") == 1 and page.count("script") == 0


def test_an_unfinished_last_line_is_ignored(run: Path) -> None:
    whole = Page(write_report(run)).of_class("line")
    write_metrics(run, rounds(20, 5), tail='{"round": 21, "lo')
    assert Page(write_report(run)).of_class("line") == whole


def test_a_broken_line_elsewhere_is_named_and_the_other_rounds_are_drawn(run: Path) -> None:
    write_metrics(run, rounds(2, 1), tail='{"round": 3, "lo\n{"round": 4, "loss": 1.0}\n')
    page = Page(write_report(run))
    assert "metrics.jsonl has 1 unreadable lines (3)" in page.text
    assert len((page.of_class("line")[0]["points"] or "").split()) == 3


def test_rounds_without_a_line_are_named(run: Path) -> None:
    assert "Not readable" not in Page(write_report(run)).text
    write_metrics(run, [row for row in rounds(20, 5) if row["round"] not in (1, 7, 8)])
    assert "metrics.jsonl has lost rounds 1, 7 to 8: restore it" in Page(write_report(run)).text


def test_a_repeated_round_counts_once_and_a_diverged_loss_is_no_point(run: Path) -> None:
    write_metrics(run, [*rounds(4, 5), *rounds(3, 5), {"round": 5, "loss": math.nan}])
    page = Page(write_report(run))
    assert len((page.of_class("line")[0]["points"] or "").split()) == 4
    assert "In 1 of 5 rounds the loss was not finite." in page.text


def test_an_empty_run_gives_a_page_that_says_so(tmp_path: Path) -> None:
    page = Page(write_report(tmp_path))
    assert "holds no results yet" in page.text
    assert page.count("svg") == page.count("img") == page.count("details") == 0


def test_a_single_round_can_be_drawn(tmp_path: Path) -> None:
    write_metrics(tmp_path, rounds(1, 1))
    assert len(Page(write_report(tmp_path)).of_class("end")) == 2


def test_the_report_replaces_the_old_one_and_leaves_nothing_else(run: Path) -> None:
    before = {path.name for path in run.iterdir()}
    write_report(run)
    write_report(run)
    assert {path.name for path in run.iterdir()} == before | {"report.html"}


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("config.toml", b"method = ["),
        ("config.toml", b"\xff\xfe"),
        ("config.toml", b"x = " + b"[" * 5000),
        ("evaluation.json", b"[1, 2"),
        ("evaluation.json", b"[" * 100_000),
        ("evaluation.json", b"[]"),
        ("evaluation.json", b'"\xff"'),
        ("metrics.jsonl", b'{"round": "x"}\n{"round": 1, "loss": 2}\n'),
        ("metrics.jsonl", b"[" * 100_000 + b"\n{}"),
        ("embedding.svg", b"<svg><g>"),
        ("embedding.svg", b"\0\1\2"),
        ("certificate.svg", b"<svg><g>"),
    ],
)
def test_an_unreadable_file_is_named_on_the_page(run: Path, name: str, content: bytes) -> None:
    (run / name).write_bytes(content)
    page = Page(write_report(run))
    assert "Not readable" in page.text and name in page.text
    assert page.count("h1") == 1


ODD: list[Any] = [
    *(None, True, -1, 1e308, -1e308, 10**400, "x", HOSTILE, "\ud800", [], [1], {}, {"a": {}}, [[]]),
    *(math.nan, math.inf, {"a": 1}, {"accuracy": {"mean": "x"}}, [None], [3], ["x"]),
]


def variants(value: Any) -> list[Any]:
    """The value with one part replaced by something odd, for every part and every odd thing."""
    found = [*ODD]
    if isinstance(value, dict):
        for key, inner in value.items():
            found += [value | {key: other} for other in variants(inner)]
            found.append({k: v for k, v in value.items() if k != key})
    elif isinstance(value, list) and value:
        found += [[other, *value[1:]] for other in variants(value[0])]
    return found


def test_no_change_to_an_evaluation_or_to_metrics_breaks_the_page(run: Path) -> None:
    write_evaluation(run, [client(i) for i in range(3)])
    whole = json.loads((run / "evaluation.json").read_text())
    changed = variants(whole)
    assert len(changed) > 500
    for content in changed:
        contents = RunContents.read("run", b"", b"", json.dumps(content).encode(), b"")
        text = page(contents)
        text.encode()
        assert "<script" not in text
    for row in variants(rounds(3, 1)[-1]):
        lines = [json.dumps(r) for r in (*rounds(2, 1), row, *rounds(5, 1)[3:])]
        page(RunContents.read("run", b"", "\n".join(lines).encode(), b"", b""))


def test_no_change_to_a_certificate_breaks_the_page() -> None:
    numbers = ("bound", "delta", "empirical_risk", "measured_error_unlabeled")
    row: dict[str, Any] = dict.fromkeys(("route", "assumes", "refused"), "x")
    row |= dict.fromkeys(numbers, 0.5)
    for content in variants({"certificate": [row], "round": 30, "psi_sha256": "0" * 64}):
        whole = json.dumps(content).encode()
        text = page(RunContents.read("run", b"", b"", b"", b"", whole), "0" * 64)
        text.encode()
        assert "<script" not in text


def test_a_changed_evaluation_is_said_to_be(run: Path) -> None:
    whole = json.loads((run / "evaluation.json").read_text())
    whole["clients"][0]["metrics"]["transductive"]["accuracy"] = 1e9
    (run / "evaluation.json").write_text(json.dumps(whole))
    text = Page(write_report(run)).text
    assert "evaluation.json has values that make no sense" in text and "c1" in text


def test_a_missing_folder_is_named(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="no run folder"):
        write_report(tmp_path / "nowhere")


@pytest.mark.parametrize(
    "values", [[0.0], [1e-9, 2e-9], [-3.0, 7.2], [1e30, 2e35], [100.0], [0.3, 0.3], [99.9, 100.0]]
)
def test_axes_hold_their_values_between_few_ticks(values: list[float]) -> None:
    axis = rounded_axis(values, 0, 100)
    assert axis.low <= min(values) <= max(values) <= axis.high
    assert 2 <= len(axis.ticks) <= 8
    assert len({axis.text(tick) for tick in axis.ticks}) == len(axis.ticks)


def test_steps_are_one_two_or_five_times_a_power_of_ten() -> None:
    assert [nice_step(span, 5) for span in (5, 7, 11, 26, 0.4)] == [1, 2, 5, 10, 0.1]


def test_charts_are_xml_and_stay_within_percent() -> None:
    ElementTree.fromstring(histogram([0.0, 100.0, 100.0], "a < b"))
    text = line_chart([(5, 100.0)], (5, 5), "a & b", percent=True)
    ElementTree.fromstring(text)
    assert "105" not in text


def separated(groups: int, each: int) -> tuple[Any, list[int]]:
    noise = np.random.default_rng(0).normal(size=(groups * each, 16))
    which = np.arange(groups * each) % groups
    return (100 * np.eye(groups, 16)[which] + 0.1 * noise).astype(np.float32), which.tolist()


def test_separated_groups_have_a_silhouette_near_one(tmp_path: Path) -> None:
    x, which = separated(4, 5)
    result = embedding_figure(x, [90 * g for g in which], "rotation", tmp_path / "figure")
    assert result["silhouette"] > 0.99


def test_the_figure_is_a_png_and_an_svg_and_the_same_again(tmp_path: Path) -> None:
    x, which = separated(3, 4)
    for name in ("a", "b"):
        embedding_figure(x, [f"site ${g}$ <&>" for g in which], "site", tmp_path / name)
    assert {path.name for path in tmp_path.iterdir()} == {"a.png", "a.svg", "b.png", "b.svg"}
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG\r\n\x1a\n")
    assert ElementTree.parse(tmp_path / "a.svg").getroot().tag.endswith("svg")
    assert (tmp_path / "a.svg").read_bytes() == (tmp_path / "b.svg").read_bytes()
    assert b"<dc:date>" not in (tmp_path / "a.svg").read_bytes()


def test_three_clients_are_enough_and_all_distinct_groups_have_no_silhouette(
    tmp_path: Path,
) -> None:
    x, _ = separated(3, 1)
    assert embedding_figure(x, ["a", "b", "c"], "site", tmp_path / "figure") == {}


def test_many_numbers_are_a_scale_and_no_groups(tmp_path: Path) -> None:
    x, _ = separated(2, 10)
    assert embedding_figure(x, [i / 7 for i in range(20)], "light", tmp_path / "figure") == {}


def test_a_long_label_is_drawn_whole(tmp_path: Path) -> None:
    """Its letters are paths in the SVG: each line of the label is a comment that names it."""
    x, which = separated(2, 10)
    label = "rotation, data.classes_per_client=0"
    embedding_figure(x, which, label, tmp_path / "groups")
    assert f"<!-- {label} -->" in (tmp_path / "groups.svg").read_text()
    embedding_figure(x, [i / 7 for i in range(20)], label, tmp_path / "scale")
    assert f"<!-- {label} -->" in (tmp_path / "scale.svg").read_text()
    longer = ", ".join([label, "data.train_clients=100000", "data.labeled_fraction=0.25"])
    embedding_figure(x, which, longer + ", data.points=40", tmp_path / "longer")
    lines = re.findall(r"<!-- (.*?) -->", (tmp_path / "longer.svg").read_text(), re.DOTALL)
    assert f"{longer}, data.points=40" in " ".join(lines).replace("\n", " ")


def test_clients_without_a_trait_have_one_colour_and_no_legend(tmp_path: Path) -> None:
    x, _ = separated(2, 3)
    assert embedding_figure(x, [""] * 6, "", tmp_path / "figure") == {}
    assert b"legend" not in (tmp_path / "figure.svg").read_bytes()


def test_clients_that_look_alike_can_be_drawn(tmp_path: Path) -> None:
    x = np.ones((6, 8), dtype=np.float32)
    assert embedding_figure(x, [0, 1] * 3, "rotation", tmp_path / "figure") == {"silhouette": 0.0}


@pytest.mark.parametrize(
    ("clients", "colors", "message"),
    [
        (np.zeros((2, 8)), [0, 1], "at least 3 clients"),
        (np.zeros((1, 8)), [0], "at least 3 clients"),
        (np.zeros((4, 8)), [0, 1], "2 values of 'rotation' for 4 clients"),
        (np.full((4, 8), np.nan), [0, 1, 0, 1], "NaN"),
        (np.zeros((4, 8)), [0.0, math.nan, 0.0, 1.0], "NaN"),
        (np.zeros(4), [0, 1, 0, 1], "shape"),
    ],
)
def test_what_cannot_be_drawn_is_an_error_for_a_person(
    tmp_path: Path, clients: Any, colors: list[float], message: str
) -> None:
    with pytest.raises(FlowdupError, match=message):
        embedding_figure(clients.astype(np.float32), colors, "rotation", tmp_path / "figure")
    assert list(tmp_path.iterdir()) == []


def test_the_report_imports_without_its_drawing_libraries() -> None:
    code = (
        "import sys; import flowdup.report; "
        "assert not {'matplotlib', 'sklearn'} & set(sys.modules), 'imported too early'"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
