"""The commands `flowdup federation ...`: a federation across machines, seen by the coordinator."""

import json
import time
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from flowdup.commands.node import check_engine
from flowdup.commands.options import Json, Settings
from flowdup.config import load_config
from flowdup.errors import ConfigError
from flowdup.interruption import Interruption
from flowdup.run.folder import RunFolder

federation_app = typer.Typer(no_args_is_help=True, help="Train across machines.")

Folder = Annotated[Path, typer.Argument(metavar="DIR", help="The federation's folder.")]
Name = Annotated[str, typer.Argument(metavar="NODE", help="The node's name.")]
Out = Annotated[Path | None, typer.Option(help="The run folder; DIR/run if not given.")]


@federation_app.command("init")
def init_command(
    nodes: Annotated[str, typer.Option(help="Their names, separated by commas.")],
    out: Annotated[Path, typer.Option(help="The federation's folder.")],
    host: Annotated[str, typer.Option(help="This machine, as nodes reach it.")] = "localhost",
    port: Annotated[int, typer.Option(help="The one port that must be open here.")] = 8002,
    as_json: Json = False,
) -> None:
    """Make certificates, and one kit per node to hand over."""
    check_engine()
    from flowdup.federation.folder import FederationFolder, FederationNames  # noqa: PLC0415
    from flowdup.federation.provision import init_federation  # noqa: PLC0415

    folder = FederationFolder(out)
    names = FederationNames(host, port, tuple(n.strip() for n in nodes.split(",") if n.strip()))
    init_federation(folder, names)
    kits = {node: str(folder.kit(node)) for node in names.nodes}
    _say(as_json, {"kits": kits}, "kits to hand over:\n" + "\n".join(kits.values()))


@federation_app.command("add")
def add_command(node: Name, folder: Folder, as_json: Json = False) -> None:
    """Make a kit for one more node, under the same authority."""
    check_engine()
    from flowdup.federation.folder import FederationFolder  # noqa: PLC0415
    from flowdup.federation.provision import add_node  # noqa: PLC0415

    kit = add_node(FederationFolder(folder), node)
    _say(as_json, {"kit": str(kit)}, f"{kit}: hand it over to {node}")


@federation_app.command("start")
def start_command(folder: Folder, as_json: Json = False) -> None:
    """Serve nodes until the process is ended."""
    check_engine()
    from flowdup.federation.folder import FederationFolder  # noqa: PLC0415
    from flowdup.federation.processes import become_server  # noqa: PLC0415

    files = FederationFolder(folder)
    names = files.read_names()
    told = f"serving {len(names.nodes)} nodes on {names.host}:{names.port}; Ctrl-C ends it"
    _say(as_json, {"host": names.host, "port": names.port}, told)
    become_server(files)


@federation_app.command("run")
def run_command(
    context: typer.Context,
    config: Annotated[str, typer.Argument(help="A preset or a TOML file.")],
    folder: Folder,
    out: Out = None,
    settings: Settings = None,
    resume: Annotated[bool, typer.Option(help="Go on from the last checkpoint.")] = False,
    minimum: Annotated[int, typer.Option(min=1, help="Nodes that a round needs.")] = 1,
    wait_for: Annotated[int, typer.Option(min=0, help="Nodes to begin with; 0: all.")] = 0,
    timeout: Annotated[float, typer.Option(min=1, help="Seconds for any call.")] = 600.0,
    silence: Annotated[
        float, typer.Option(min=3, help="Seconds without a sign of life: a node is given up.")
    ] = 10.0,
    norm_bound: Annotated[
        float | None, typer.Option(help="Larger updates are refused; 1000 if not given.")
    ] = None,
    encoding: Annotated[
        str | None, typer.Option(help="Of replies: plain, factors (if not given), bf16 or int8.")
    ] = None,
    secure_sum: Annotated[
        bool, typer.Option(help="See the sum of the nodes' updates alone.")
    ] = False,
    number_bound: Annotated[
        float, typer.Option(help="With --secure-sum: the largest number of an update.")
    ] = 8.0,
    most_clients: Annotated[
        int, typer.Option(min=1, help="A node that says it has more is refused.")
    ] = 10_000,
    as_json: Json = False,
) -> None:
    """Train with the nodes that are there, into a run folder."""
    check_engine()
    from flowdup.federation.calls import CallSettings  # noqa: PLC0415
    from flowdup.federation.folder import FederationFolder  # noqa: PLC0415
    from flowdup.federation.settings import FederationSettings  # noqa: PLC0415
    from flowdup.federation.supervise import RunRequest, run_federation  # noqa: PLC0415
    from flowdup.wire import ENCODINGS  # noqa: PLC0415

    if encoding is not None and encoding not in ENCODINGS:
        raise ConfigError(f"unknown encoding '{encoding}': use one of {', '.join(ENCODINGS)}")
    if secure_sum and norm_bound is not None:
        raise ConfigError("a secure sum hides the norms that --norm-bound looks at: leave one out")
    how = FederationSettings(
        max(minimum, 3) if secure_sum else minimum,
        1000.0 if norm_bound is None else norm_bound,
        encoding or ("plain" if secure_sum else "factors"),
        secure_sum,
        number_bound,
        most_clients,
    )
    run = RunFolder(out or folder / "run")
    request = RunRequest(
        load_config(config, settings or []),
        run.path,
        resume,
        wait_for,
        calls=CallSettings(timeout, silence),
        federation=how,
        modules=tuple(context.obj),
    )
    shown = len(run.read_metrics())
    with Interruption() as stop:
        for line in run_federation(FederationFolder(folder), request, stop):
            if not as_json:
                print(line, flush=True)
                continue
            rows = run.read_metrics()
            for row in rows[shown:]:
                print(json.dumps(row), flush=True)
            shown = len(rows)
            Console(stderr=True).print(line, soft_wrap=True, markup=False, highlight=False)
        if stop():
            stop.end_program("--resume")


@federation_app.command("status")
def status_command(folder: Folder, out: Out = None, as_json: Json = False) -> None:
    """Rounds, who is alive, bytes up and down, the last loss, refused and suspended nodes."""
    check_engine()
    from flowdup.federation.folder import FederationFolder  # noqa: PLC0415
    from flowdup.federation.status import federation_status  # noqa: PLC0415

    found = federation_status(FederationFolder(folder), out or folder / "run")
    if as_json:
        print(json.dumps(found))
        return
    _print_status(found)


@federation_app.command("suspend")
def suspend_command(node: Name, folder: Folder, as_json: Json = False) -> None:
    """Leave a node out of all rounds from the next job on."""
    _record(folder, node).suspend(node)
    _say(as_json, {"suspended": node}, f"{node} is suspended")


@federation_app.command("readmit")
def readmit_command(node: Name, folder: Folder, as_json: Json = False) -> None:
    """Let a suspended node take part again, its refusals forgotten."""
    _record(folder, node).readmit(node)
    _say(as_json, {"readmitted": node}, f"{node} may take part again")


def _record(folder: Path, node: str) -> Any:
    from flowdup.federation.folder import FederationFolder  # noqa: PLC0415
    from flowdup.federation.record import NodeRecord  # noqa: PLC0415

    files = FederationFolder(folder)
    if node not in files.read_names().nodes:
        raise ConfigError(f"there is no node '{node}': see `flowdup federation status {folder}`")
    return NodeRecord(files)


def _print_status(found: dict[str, Any]) -> None:
    console, loss = Console(), found["loss"]
    console.print(
        f"round {found['round']} of {found['rounds'] or '?'}, server {found['server']}, loss "
        f"{'-' if loss is None else f'{loss:.4f}'}, up {found['bytes_up']:,} bytes "
        f"({found['bytes_up_per_client'] or 0:,} per client and round), down "
        f"{found['bytes_down']:,} ({found['bytes_down_per_client'] or 0:,}), certificates valid "
        f"until {found['certificates_until']}",
        highlight=False,
        soft_wrap=True,
    )
    table = Table("node", "alive", "clients", "labeled", "round", "MB up", "MB down", "refused")
    table.columns[0].no_wrap = True
    for row in found["nodes"]:
        alive = {True: "yes", False: "no", None: "?"}[row["alive"]]
        counts = ("?" if row[k] is None else str(row[k]) for k in ("clients", "labeled_clients"))
        refused = f"{len(row['refusals'])}{', suspended' if row['suspended'] else ''}"
        up, down = (f"{row[key] / 1e6:,.1f}" for key in ("bytes_up", "bytes_down"))
        table.add_row(row["node"], alive, *counts, str(row["last_round"]), up, down, refused)
    console.print(table)
    for row in found["nodes"]:
        for refusal in row["refusals"]:
            told = f"refused {row['node']} in round {refusal['round']}: {refusal['reason']}"
            console.print(told, soft_wrap=True, markup=False, highlight=False)
    for reason, own in found["refused"].items():
        when = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(own["last"]))
        told = f"turned away by the server, {own['count']} times, last {when}: {reason}"
        console.print(told, soft_wrap=True, markup=False, highlight=False)


def _say(as_json: bool, result: dict[str, Any], sentence: str) -> None:
    print(json.dumps(result) if as_json else sentence, flush=True)
