"""Time and memory: of rounds, of whole runs, of personalising, of many clients."""

from collections import defaultdict
from collections.abc import Iterable, Sequence

from layout import Results, bold, grid, known, origins
from table import Result, markdown


def times(rows: Sequence[Result], work: str, contenders: Iterable[str]) -> list[float | None]:
    """Milliseconds per round; Flower's are of the faster variant."""
    found = []
    for name in contenders:
        names = [name, f"{name} actors", f"{name} threads"]
        mine = [row for row in rows if row["work"] == work and row["contender"] in names]
        found.append(min(known(mine, "ms_per_round"), default=None))
    return found


def rounds(
    results: Results, file: str, cohort: int, works: dict[str, str], columns: dict[str, str]
) -> str:
    """Works down, contenders across; a title may ask for a version: "pfl {pfl}"."""
    rows = results.bench(file)
    versions = defaultdict(str, (pair for row in rows for pair in row["versions"].items()))
    titles = [title.format_map(versions).strip() for title in columns.values()]
    body = []
    for work, label in works.items():
        ms = times(rows, work, columns)
        body.append([label, *bold([short(value) for value in ms], ms, min)])
    return grid([f"{rows[0]['device']}, {cohort} clients, ms", *titles], body)


def short(value: float | None) -> str:
    if value is None:
        return ""
    return f"{value:,.0f}" if value >= 100 else f"{value:.1f}"


def start_up(results: Results) -> str:
    rows = {(row["work"], row["contender"]): row for row in results.bench("gpu")}
    whole, resnet = "whole run cifar10 cnn", "flowdup resnet18"
    lines = {
        "1000 rounds of FLowDUP on CIFAR-10, bf16, 20 evaluations": (whole, "flowdup, warm"),
        "the same, where nothing was compiled before": (whole, "flowdup, cold"),
        "ResNet18's first round, TF32, where nothing was compiled before": (resnet, "flowdup"),
        "then its first in bf16, which shares some kernels": (resnet, "flowdup bf16"),
    }
    body = []
    for label, key in lines.items():
        row = rows.get(key, {})
        seconds = row.get("seconds") or row.get("first_round_s")
        body.append([label, f"{seconds:.0f}" if seconds else ""])
    return grid([next(iter(rows.values()))["device"], "seconds"], body)


def across_machines(results: Results) -> str:
    """What `make federation-demo` measured."""
    (row,) = rows = results.bench("federation-demo")
    apart = row["max_difference_to_simulation"]
    up, down = (row[f"bytes_{way}_per_client"] / 1e6 for way in ("up", "down"))
    took_part = ", ".join(map(str, row["rounds_of_killed_node"]))
    body = [
        ["seconds per round, median", f"{row['seconds_per_round']:.2f}"],
        ["largest difference of psi to the simulator's", f"{apart:.1e}"],
        [
            f"seconds until round {row['round_of_kill']} went on after kill -9 of a node",
            f"{row['seconds_until_round_went_on_after_kill']:.1f}",
        ],
        ["rounds that this node took part in", took_part],
        ["MB up and down, per client and round", f"{up:.2f}, {down:.2f}"],
        ["seconds for all of it", f"{row['seconds']:.0f}"],
    ]
    nodes, numbers = row["nodes"], row["parameters"]
    head = f"{nodes} nodes, {numbers:,} numbers in psi, {row['rounds']} rounds"
    return f"{grid([head, ''], body)}\n{origins(rows)}"


def personalizing(results: Results) -> str:
    ways = {
        "h1 forward": "one forward pass of h1",
        "prepared h1 forward": "the same, prepared",
        "personalize": "weights, `method.personalize`",
        "Federation.personalize": "a module, `federation.personalize(x)`",
        "personalizer": "weights, `federation.personalizer(x)`",
        "personalizer, predict": "the same and a first prediction",
    }
    found = [
        {row["contender"]: row for row in results.bench(file) if "personalize" in row["work"]}
        for file in ("cpu", "gpu")
    ]

    def cells(row: Result) -> list[str]:
        ms, ratio = row.get("ms_per_round"), row.get("ratio_to_h1")
        return [f"{ms:#.3g}" if ms else "", f"{ratio:.2f}" if ratio else ""]

    body = [
        [label, *(cell for device in found for cell in cells(device.get(way, {})))]
        for way, label in ways.items()
    ]
    devices = [next(iter(rows.values()))["device"] for rows in found]
    head = [text for device in devices for text in (f"{device}, ms", "times h1")]
    return grid(["from 100 images", *head], body)


def browser(results: Results) -> str:
    (row,) = results.bench("browser")
    names = {"first_ms": "first", "median_ms": "median of all", "best_ms": "best"}
    times = {name: row.get(key) for key, name in names.items()}
    steps = {f"in the best: {step.lower()}": ms for step, ms in row.get("steps_ms", {}).items()}
    steps.pop("in the best: all together", None)
    body = [
        [name, "" if ms is None else f"{ms:.3g}"] for name, ms in (times | steps).items() if ms != 0
    ]
    return grid(["`cnn`, k = 10^4, from 100 images", "ms"], body)


def population(results: Results) -> str:
    rows = results.bench("population")
    engines = ["batched", "sequential"]
    cases = [(1_000, 100, "lazy"), *((10**6, n, "lazy") for n in (10, 100, 1000))]
    cases.append((10_000, 100, "stored"))

    def line(clients: int, cohort: int, kind: str) -> list[str]:
        wanted = {"population": clients, "cohort": cohort, "clients": kind}
        mine = {row["engine"]: row for row in rows if wanted.items() <= row.items()}
        cells = [f"{clients:,}, {kind}", f"{cohort:,}"]
        before = known(list(mine.values()), "peak_mb_before_rounds")
        cells.append(f"{before[0]:,.0f}" if before else "")
        for engine in engines:
            row = mine.get(engine, {})
            memory, seconds = row.get("peak_mb"), row.get("seconds_per_round")
            cells += [f"{memory:,.0f}" if memory else "", f"{seconds:#.2g}" if seconds else ""]
        return cells

    head = [text for engine in engines for text in (f"{engine}: MB", "s per round")]
    return grid(
        ["clients", "in a round", "MB before rounds", *head], [line(*case) for case in cases]
    )


def benched(results: Results, file: str) -> str:
    rows = results.bench(file)
    return f"{markdown(rows)}\n{origins([row for row in rows if 'absent' not in row])}"
