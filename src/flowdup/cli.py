"""The command line: parse, call, print."""

import itertools
import json
import os
import sys
from collections.abc import Callable, Generator
from pathlib import Path
from typing import Annotated, Any, NamedTuple, NoReturn

import torch
import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from flowdup.campaign.command import reproduce
from flowdup.commands.certify import certify
from flowdup.commands.compare import compare
from flowdup.commands.completion import complete_preset
from flowdup.commands.demo import demo
from flowdup.commands.doctor import doctor
from flowdup.commands.evaluate import evaluate
from flowdup.commands.export import export
from flowdup.commands.federation import federation_app
from flowdup.commands.init import init
from flowdup.commands.listing import presets, settings
from flowdup.commands.node import node
from flowdup.commands.one_client import Client, check_client
from flowdup.commands.options import Inputs, Json, Settings
from flowdup.commands.personalize import personalize
from flowdup.commands.serve import serve
from flowdup.config import load_config
from flowdup.data.fetch import fetch as fetch_source
from flowdup.data.numpy_files import write_array
from flowdup.data.sources import SOURCES, data_folder, named
from flowdup.data.user_data import read_named_inputs
from flowdup.devices import gpu_is_full
from flowdup.engines.distributed import is_main_process
from flowdup.errors import ConfigError, FlowdupError, GpuMemoryError, printable
from flowdup.interruption import Interruption
from flowdup.laws import check_method, read_cases
from flowdup.methods import METHODS, summary
from flowdup.personalize import load_model
from flowdup.progress import Downloads, Rounds, warning_lines
from flowdup.provenance import version_text
from flowdup.registry import import_modules
from flowdup.run import RunFolder, embed_run, train_run
from flowdup.run.folder import Metrics
from flowdup.run.origin import stored_config
from flowdup.settings import plain

app = typer.Typer(no_args_is_help=True, pretty_exceptions_enable=False)
data_app = typer.Typer(no_args_is_help=True, help="Public image sets: list, fetch, verify.")
app.add_typer(data_app, name="data")
app.add_typer(federation_app, name="federation")
_TRAINED = (evaluate, doctor, certify, export, serve, node)
for command in (demo, init, personalize, *_TRAINED, compare, reproduce, settings, presets):
    app.command()(command)
console = Console(quiet=not is_main_process())

Preset = Annotated[
    str | None,
    typer.Argument(help="A preset or a TOML file.", autocompletion=complete_preset),
]
Imports = Annotated[
    list[str] | None,
    typer.Option("--import", help="Files or modules that register your own."),
]
Folder = Annotated[Path, typer.Argument(help="A run folder.")]


def _print_version(wanted: bool) -> None:
    if wanted:
        print(f"flowdup {version_text()}")
        raise typer.Exit


Version = Annotated[
    bool,
    typer.Option("--version", callback=_print_version, is_eager=True, help="Print it and exit."),
]


@app.callback()
def flowdup(context: typer.Context, modules: Imports = None, version: Version = False) -> None:
    """Train clients together, then give any client its own model, labels or not."""
    context.obj = modules or []
    import_modules(context.obj)


@app.command()
def train(
    out: Annotated[Path, typer.Option(help="The run folder.")],
    preset: Preset = None,
    settings: Settings = None,
    resume: Annotated[bool, typer.Option(help="Go on from the last checkpoint.")] = False,
    as_json: Json = False,
) -> None:
    """Train a federation into a run folder."""
    if preset is None and not resume:
        raise ConfigError("give a preset or a TOML file, or --resume to continue a run")
    folder = RunFolder(out)
    settings = settings or []
    config = load_config(preset, settings) if preset else stored_config(folder, settings)
    with Interruption(verbose=is_main_process()) as stop:
        rounds = train_run(config, out, resume, stop=stop)
        if as_json:
            with warning_lines(Console(stderr=True)):
                shown = _show_all(rounds, lambda metrics: print(json.dumps(metrics), flush=True))
        else:
            with Rounds(config.rounds) as progress:
                shown = _show_all(rounds, progress.show)
        if shown.stopped:
            stop.end_program("--resume")
    if not shown.rounds:
        told = f"{out} is finished, after round {folder.count_rounds()}: nothing was left to train"
        Console(stderr=as_json, quiet=console.quiet).print(told, soft_wrap=True, highlight=False)
    if not as_json:
        console.print(f"run folder {out}, report {folder.report}")


@app.command()
def predict(
    model: Annotated[Path, typer.Argument(help="A model file from `personalize`.")],
    source: Inputs,
    out: Annotated[Path | None, typer.Option(help="Write the classes to this .npy file.")] = None,
    coverage: Annotated[
        float | None, typer.Option("--set", help="Print sets of classes, with 0.9 coverage, say.")
    ] = None,
    client: Client = "",
    as_json: Json = False,
) -> None:
    """Predict classes with a client's own model, each with its probability.

    Each image is printed with the name of its file.

    With --set 0.9, every point gets a set of classes that has its class with probability 0.9, if
    the run was certified before the model was made.
    """
    own = load_model(model)
    column = own.client_column
    if client or not own.is_global:
        check_client(source, client, column, "the model of one is applied to all of them")
    x, files = read_named_inputs(source, own.inputs.shape, own.inputs.columns, client, column)
    found = own.predictions(x)
    if coverage is not None:
        sets = own.predict_set(x, coverage).tolist()
        found["sets"] = [
            [n for n, here in zip(own.class_names, s, strict=True) if here] for s in sets
        ]
    if out is not None:
        write_array(out, found["classes"])
    texts = [f"{p:.3f} {n}" for p, n in zip(found["probabilities"], found["names"], strict=True)]
    if coverage is not None:
        texts = [f"{t} {{{', '.join(s)}}}" for t, s in zip(texts, found["sets"], strict=True)]
    if files:
        found["files"] = files
        texts = [f"{text}  {file}" for text, file in zip(texts, files, strict=True)]
    _say(as_json, found, "\n".join(map(printable, texts)))


@app.command()
def embed(
    folder: Folder,
    by: Annotated[str, typer.Option(help="The trait that colours clients.")] = "",
    group: Annotated[str, typer.Option(help="train, validation or test clients.")] = "validation",
    out: Annotated[Path | None, typer.Option(help="File name without ending.")] = None,
    settings: Settings = None,
    as_json: Json = False,
) -> None:
    """Draw clients' embeddings r(X), by PCA and t-SNE, as PNG and SVG.

    The clients are the run's own, or, with --set data.KEY=VALUE, others.
    """
    found = embed_run(folder, by, group, out, settings or [])
    _say(as_json, found, f"{' and '.join(found['files'])}, coloured by {found['by'] or 'nothing'}")


@app.command()
def methods(as_json: Json = False) -> None:
    """What methods there are, and their settings."""
    found = [
        {
            "name": name,
            "summary": summary(name),
            "learns_unlabeled": entry.method.learns_unlabeled,
            "settings": plain(entry.settings()),
        }
        for name, entry in METHODS.items()
    ]
    if as_json:
        print(json.dumps(found))
        return
    for row in found:
        print(f"{row['name']:12} {row['summary']}")


@app.command()
def check(
    module: Annotated[str, typer.Argument(help="A file or module of methods, or one's name.")],
    settings: Settings = None,
    model: Annotated[str, typer.Option(help="The clients' model.")] = "cnn-small",
    as_json: Json = False,
) -> None:
    """Hold methods to the laws that every method keeps; exit code 1 if one is broken."""
    verdicts = {
        name: list(check_method(case)) for name, case in read_cases(module, model, settings or [])
    }
    broken = any(verdict.broken for found in verdicts.values() for verdict in found)
    if as_json:
        print(json.dumps({name: [v._asdict() for v in found] for name, found in verdicts.items()}))
        sys.exit(int(broken))
    for name, found in verdicts.items():
        console.print(f"[bold]{name}[/bold]")
        for law, text, reason in found:
            mark = Text("broken", "bold red") if reason else Text("kept  ", "green")
            console.print(Text.assemble(mark, f" {law}: {text}"), soft_wrap=True)
            if reason:
                console.print(Text(f"       {reason}"), soft_wrap=True)
    sys.exit(int(broken))


@data_app.command("list")
def data_list(as_json: Json = False) -> None:
    """What sets there are and where they lie."""
    found = {name: source.find(data_folder()) for name, source in SOURCES.items()}
    if as_json:
        print(json.dumps({name: path and str(path) for name, path in found.items()}))
        return
    table = Table("set", "images", "classes", "found")
    for name, source in SOURCES.items():
        shape = "x".join(map(str, source.shape))
        table.add_row(
            name, shape, str(source.classes), str(found[name] or f"no: flowdup data fetch {name}")
        )
    console.print(table)
    console.print(f"data folder: {data_folder()}")


@data_app.command("fetch")
def data_fetch(name: str, as_json: Json = False) -> None:
    """Download a set from its official place and check every byte."""
    with Downloads(quiet=as_json) as progress:
        path = fetch_source(named(name), data_folder(), progress.show)
    _say(as_json, {"path": str(path)}, f"{path} is checked and right")


@data_app.command("verify")
def data_verify(name: str, as_json: Json = False) -> None:
    """Check every byte of a set."""
    path = named(name).verify(data_folder())
    _say(as_json, {"path": str(path)}, f"{path} is checked and right")


class _Shown(NamedTuple):
    rounds: int
    stopped: bool  # with rounds left


def _show_all(rounds: Generator[Metrics, None, bool], show: Callable[[Metrics], None]) -> _Shown:
    """Show every round's metrics as it is done."""
    for number in itertools.count():
        try:
            metrics = next(rounds)
        except StopIteration as end:
            return _Shown(number, bool(end.value))
        show(metrics)
    raise AssertionError  # it counts without end


def _say(as_json: bool, result: dict[str, Any], sentence: str) -> None:
    if as_json:
        print(json.dumps(result))
    else:
        console.print(sentence, soft_wrap=True, markup=False, highlight=False, emoji=False)


def main() -> None:
    """The command `flowdup`: an error for a person is one sentence and an exit code."""
    if not is_main_process():
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115  (until the process ends)
    try:
        app()
    except FlowdupError as error:
        _fail(str(error), error.exit_code)
    except torch.OutOfMemoryError:
        _fail(str(gpu_is_full()), GpuMemoryError.exit_code)
    except OSError as error:
        _fail(f"{error.strerror or error}: {error.filename}; check the path and its permissions")


def _fail(sentence: str, exit_code: int = 2) -> NoReturn:
    message = Text.assemble(("error:", "bold red"), f" {sentence}")
    Console(stderr=True).print(message, soft_wrap=True)
    sys.exit(exit_code)
