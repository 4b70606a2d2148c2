"""The command line: `clawpipe up | check | status | ledger | replay | drain | ...`. Parses, calls, prints, no more."""

from __future__ import annotations

import importlib.metadata
import json
import sys
import tomllib
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any

import anyio
import msgspec
import typer

from clawpipe.pipeline import audit, replay_command
from clawpipe.pipeline import config as configuration
from clawpipe.pipeline import demos as demonstrations
from clawpipe.pipeline import runtime as runtimes
from clawpipe.pipeline.broker import Broker
from clawpipe.pipeline.checks import run_checks
from clawpipe.pipeline.errors import ClawpipeError, ConfigError, one_line
from clawpipe.pipeline.launch import Ended, Launch, launch
from clawpipe.pipeline.observe import start_log, steps
from clawpipe.pipeline.run_folder import is_running
from clawpipe.pipeline.screen import make_screen, status_lines, summary_lines

HELP = "Trains a language model with reinforcement learning inside real, unmodified agent harnesses."

app = typer.Typer(add_completion=False, no_args_is_help=True, pretty_exceptions_enable=False, help=HELP)

ConfigPath = Annotated[Path, typer.Argument(help="The configuration, a TOML file.", metavar="CONFIG")]
Overrides = Annotated[
    list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Replaces a key: --set learner.lr=1e-5.")
]
OfRun = Annotated[Path, typer.Argument(help="The folder of a run.", metavar="RUN_DIR")]
AsJson = Annotated[bool, typer.Option("--json", help="For programs.")]
RunDir = Annotated[Path | None, typer.Option("--run-dir", help="The run folder; default: a new or the newest one.")]


@app.command()
def up(
    config: ConfigPath,
    updates: Annotated[int | None, typer.Option(min=1, help="Ends after so many updates.")] = None,
    run_dir: RunDir = None,
    summary: Annotated[Path | None, typer.Option(help="Writes what the run measured, as JSON.")] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Goes on with the run of the run folder.")] = False,
    set_: Overrides = None,
) -> None:
    """Runs everything that CONFIG does not name as external, until the updates are done or you press Ctrl-C."""
    overrides = parse_overrides(set_ or [])
    if updates is not None:
        overrides["run.updates"] = updates
    loaded = configuration.load(config, overrides)
    if summary is not None and (summary.is_dir() or not summary.absolute().parent.is_dir()):
        raise ConfigError(f"--summary {summary}: no file can be written there; make its folder, or name a file")
    started = Launch(config=loaded, run_dir=choose_run_dir(loaded, run_dir, resume), resume=resume)
    with make_screen(started.run_dir, loaded.run.updates) as screen:
        ended = anyio.run(launch, started, screen)
    if ended is Ended.STOPPED:
        raise typer.Exit(130)
    measured = (started.run_dir / "summary.json").read_bytes()
    if summary is not None:
        summary.write_bytes(measured)
    for line in summary_lines(json.loads(measured)):
        typer.echo(line)


@app.command()
def check(
    config: ConfigPath,
    offline: Annotated[bool, typer.Option("--offline", help="Looks at nothing outside the file.")] = False,
    set_: Overrides = None,
) -> None:
    """Says everything that would fail before anything starts."""
    loaded = configuration.load(config, parse_overrides(set_ or []))
    report = run_checks(loaded, offline=offline)
    for note in report.notes:
        typer.echo(note)
    for problem in report.problems:
        typer.echo(problem, err=True)
    if report.problems:
        raise typer.Exit(2)
    typer.echo(f"{config}: no problem found")


@app.command()
def demos(
    config: ConfigPath,
    out: Annotated[Path | None, typer.Option(help="Where to write them; default: where `up` looks for them.")] = None,
    set_: Overrides = None,
) -> None:
    """Makes demonstrations: the harnesses of CONFIG at work, with a script in place of the model."""
    loaded = configuration.load(config, parse_overrides(set_ or []))
    start_log("demos", loaded.observe.level)
    written = demonstrations.make(loaded, out, load_role)
    for line in demonstrations.table(written):
        typer.echo(line)
    typer.echo(f"{written}: written")


@app.command()
def status(run_dir: RunDir = None, as_json: Annotated[bool, typer.Option("--json")] = False) -> None:
    """Shows where a run stands."""
    folder = run_dir or newest_run(Path("runs"))
    runtimes.load(folder)
    if as_json:
        path = folder / "status.json"
        try:
            state: dict[str, Any] = json.loads(path.read_bytes()) if path.exists() else {}
        except ValueError as err:
            raise ConfigError(f"{path}: not a status file ({err}); the run writes it anew while it goes") from err
        state["steps"] = [msgspec.to_builtins(step) for step in steps(folder)]
        typer.echo(json.dumps(state, indent=2))
        return
    for line in status_lines(folder):
        typer.echo(line)


@app.command()
def ledger(run_dir: OfRun, as_json: AsJson = False) -> None:
    """Proves that every rollout, call and token of a run ended in a named state, or names the first that did not."""
    found = audit.audit(run_dir, goes_on=is_running(run_dir))
    for line in [audit.as_json(found)] if as_json else audit.lines(found):
        typer.echo(line)
    if found.wrong is not None:
        raise typer.Exit(1)


@app.command()
def replay(
    run_dir: OfRun,
    batches: Annotated[Path | None, typer.Option(help="A folder for the bodies, <batch id>.msgpack.")] = None,
    as_json: AsJson = False,
) -> None:
    """Rebuilds the trees and batches of a run that has ended from its stored records, and compares them."""
    found = replay_command.replay(run_dir, goes_on=is_running(run_dir), batches_dir=batches)
    for line in [json.dumps(msgspec.to_builtins(found), indent=2)] if as_json else replay_command.lines(found):
        typer.echo(line)
    if found.first is not None:
        raise typer.Exit(1)


@app.command()
def drain(run_dir: RunDir = None) -> None:
    """Lets a run end in order: no new rollouts, those in flight are finished, then everything stops."""
    folder = run_dir or newest_run(Path("runs"))
    runtime = runtimes.load(folder)
    config = configuration.restore(folder / "config.json")
    if not is_running(folder):
        raise ConfigError(f"{folder}: no run is going on here; `clawpipe status` shows how the last one ended")

    async def ask() -> None:
        async with Broker.of_run(runtime, config.nats) as broker:
            await broker.request_drain()

    anyio.run(ask)
    typer.echo(f"{folder}: draining")


@app.command()
def run(
    role: Annotated[str, typer.Argument(help="proxy, actor, pipeline, learner, engine, ...")],
    run_dir: Annotated[Path, typer.Option("--run-dir", help="A prepared run folder.")],
) -> None:
    """Runs one process of the system on the run folder that `clawpipe up` prepared."""
    main_of_role = load_role(role)
    config = configuration.restore(run_dir / "config.json")
    runtime = runtimes.load(run_dir)
    start_log(role, config.observe.level)
    main_of_role(config, runtime)


def load_role(role: str) -> Callable[[configuration.Config, runtimes.Runtime], None]:
    """The main function of a role, from the installed entry points. ConfigError for an unknown role."""
    found = {entry.name: entry for entry in importlib.metadata.entry_points(group="clawpipe.roles")}
    if role not in found:
        raise ConfigError(f"unknown role {role!r}; choose one of {', '.join(sorted(found))}")
    main_of_role: Callable[[configuration.Config, runtimes.Runtime], None] = found[role].load()
    return main_of_role


def parse_overrides(assignments: list[str]) -> dict[str, Any]:
    """["a.b=1"] -> {"a.b": 1}; values are TOML, a bare word is a string. ConfigError for a missing `=`."""
    found = {}
    for assignment in assignments:
        key, sign, value = assignment.partition("=")
        if not sign or not key:
            raise ConfigError(f"--set {assignment}: write KEY=VALUE, for example --set learner.lr=1e-5")
        try:
            found[key] = tomllib.loads(f"value = {value}")["value"]
        except tomllib.TOMLDecodeError:
            found[key] = value
    return found


def choose_run_dir(config: configuration.Config, given: Path | None, resume: bool) -> Path:
    """The run folder: the given one, the newest (to resume), or a new one named by run and time."""
    root = Path(config.run.dir)
    if resume:
        folder = given or newest_run(root)
        runtimes.load(folder)
        return folder.resolve()
    if given is None:
        return (root / f"{config.run.name}-{_stamp()}").resolve()
    if (given / "runtime.json").exists():
        raise ConfigError(f"{given}: holds a run already; add --resume to go on with it, or give another --run-dir")
    return given.resolve()


def newest_run(root: Path) -> Path:
    """The run folder that was written last. ConfigError when there is none."""
    found = sorted(root.glob("*/runtime.json"), key=lambda path: path.stat().st_mtime)
    if not found:
        raise ConfigError(f"{root}: no run folder here; give --run-dir")
    return found[-1].parent


def add_commands(to: typer.Typer) -> None:
    """The commands that other rooms bring: this one imports neither."""
    for entry in importlib.metadata.entry_points(group="clawpipe.commands"):
        add_command(to, entry.name, entry.load())


def add_command(to: typer.Typer, name: str, found: typer.Typer | Callable[..., None]) -> None:
    """A plain command, or one with commands of its own."""
    if isinstance(found, typer.Typer):
        to.add_typer(found, name=name)
    else:
        to.command(name)(found)


def _stamp() -> str:
    return datetime.now(UTC).strftime("%Y%m%d-%H%M%S")


def main() -> None:
    """Entry point: errors that a user can act on are one line and exit code 2."""
    try:
        add_commands(app)
        app()
    except ClawpipeError as err:
        typer.echo(f"clawpipe: {one_line(err)}", err=True)
        sys.exit(2)
    except BaseExceptionGroup as group:
        known, other = group.split(ClawpipeError)
        if known is None or other is not None:
            raise
        typer.echo(f"clawpipe: {one_line(_first(known))}", err=True)
        sys.exit(2)


def _first(group: BaseExceptionGroup[ClawpipeError]) -> BaseException:
    error: BaseException = group
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error
