"""The command line: serve, call, run, bench, memory, ledger, w12, report, controller, init.

Parses, calls one function of a part, prints. Heavy imports happen inside the commands.
"""

import contextlib
import json
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from specpilot.errors import InvalidInput, SpecPilotError
from specpilot.home import home

__all__ = ["app", "main"]

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="Make speculative decoding deployments faster, provably without changing the output.",
)
memory_app = typer.Typer(no_args_is_help=True, help="The memory of mechanisms and findings.")
ledger_app = typer.Typer(no_args_is_help=True, help="The controller's ledger.")
w12_app = typer.Typer(no_args_is_help=True, help="Lossless 12-bit weights.")
app.add_typer(memory_app, name="memory")
app.add_typer(ledger_app, name="ledger")
app.add_typer(w12_app, name="w12")

JsonFile = Annotated[
    str | None, typer.Option("--json", metavar="FILE", help="write the result here; - prints it")
]


def main() -> None:
    """Run the command line. An error of ours is a message and exit status 1, no traceback."""
    try:
        app()
    except SpecPilotError as error:
        typer.secho(f"specpilot: {error}", fg="red", err=True)
        sys.exit(1)
    except KeyboardInterrupt:
        sys.exit(130)


@app.command()
def serve() -> None:
    """Serve the tools over MCP on standard input and output."""
    from specpilot.mcp_server.server import serve_stdio

    serve_stdio()


@app.command()
def call(
    tool: Annotated[str, typer.Argument(help="a tool's name, such as deployment_list")],
    arguments: Annotated[str, typer.Argument(help="its arguments as a JSON object")] = "{}",
    json_file: JsonFile = "-",
) -> None:
    """Call any MCP tool from the shell and print its structured result."""
    from specpilot.mcp_server.driver import call_tool

    _write(json_file, call_tool(tool, _object(arguments)))


@app.command()
def run(
    deployment: Annotated[str, typer.Option(help="what to optimise")] = "pico",
    resume: Annotated[
        str | None, typer.Option(metavar="ROUND", help="go on with a round that was interrupted")
    ] = None,
    json_file: JsonFile = None,
) -> None:
    """Carry out one round without a language model, through the MCP server."""
    from rich.console import Console

    from specpilot.harness import benchmarks
    from specpilot.harness.rounds import report
    from specpilot.mcp_server.driver import report_path, run_round

    console = Console(stderr=json_file == "-")
    finished = run_round(deployment, console, resume=resume)
    status = finished["status"]
    console.print(report.closing_table(status))
    console.print(f"{status['final']['reason']}", markup=False)
    console.print(f"isolation {finished['isolation']}", markup=False)
    console.print(f"report   {report_path(status['round'])}", markup=False, soft_wrap=True)
    console.print(f"ledger   {home() / 'ledger' / 'ledger.jsonl'}", markup=False, soft_wrap=True)
    if json_file:
        command = f"specpilot run --deployment {deployment}"
        rows = report.results(finished)
        benchmarks.write(json_file, benchmarks.document(f"run-{deployment}", command, rows))


@app.command()
def bench(
    name: Annotated[str, typer.Argument(help="a benchmark's name")],
    json_file: JsonFile = None,
) -> None:
    """Run a benchmark and write its results with machine, versions and commit."""
    from specpilot.harness import benchmarks

    _results(name, f"specpilot bench {name}", benchmarks.run(name), json_file)


@app.command()
def report(round_id: Annotated[str, typer.Argument(metavar="ROUND")]) -> None:
    """Print the report of a finished round."""
    from specpilot.mcp_server.driver import report_path

    path = report_path(round_id)
    if not path.exists():
        raise InvalidInput(
            f"Round {round_id} has no report yet.",
            hint=f"Finish it with: specpilot run --resume {round_id}",
        )
    typer.echo(path.read_text("utf-8"))


@app.command()
def controller() -> None:
    """Run the controller in the foreground: the only process that measures and promotes."""
    from specpilot.harness.controller.__main__ import main as run_controller

    sys.exit(run_controller(["--home", str(home())]))


@app.command()
def init(
    folder: Annotated[Path, typer.Argument(help="project folder of the client")] = Path(),
) -> None:
    """Write a client's MCP configuration (.mcp.json) that starts this server."""
    path = folder / ".mcp.json"
    config: dict[str, Any] = {}
    if path.exists():
        config = _object(path.read_text("utf-8"))
    servers = config.setdefault("mcpServers", {})
    servers["specpilot"] = {
        "command": sys.executable,
        "args": ["-P", "-m", "specpilot.mcp_server.server"],
        "env": {"SPECPILOT_HOME": str(home())},
    }
    path.write_text(json.dumps(config, indent=2) + "\n", "utf-8")
    typer.echo(f"wrote {path}")


@ledger_app.command("verify")
def ledger_verify(json_file: JsonFile = None) -> None:
    """Check chain, signatures and anchor; explain the first bad record."""
    from specpilot.harness.controller.client import ensure_running

    with ensure_running() as client:
        found = client.ledger_verify()
    payload = {
        "path": found.path,
        "ok": found.ok,
        "head": found.head.hash,
        "records": found.records,
    }
    _write(json_file, payload)
    if json_file != "-":
        typer.echo(f"{found.path}: {found.records} records, head {found.head.hash[:16]}")
        typer.echo("the ledger holds" if found.ok else f"NOT SOUND: {found.problem}")
    if not found.ok:
        sys.exit(1)


@memory_app.command("check")
def memory_check(json_file: JsonFile = None) -> None:
    """Look for duplicates, contradictions, dead links, receipts that do not verify."""
    from dataclasses import asdict

    from specpilot.harness.rounds.knowledge import open_memory
    from specpilot.memory.checks import check_memory

    with open_memory() as store:
        findings = check_memory(store)
        count = len(store)
    _write(json_file, {"entries": count, "findings": [asdict(finding) for finding in findings]})
    errors = sum(finding.severity == "error" for finding in findings)
    if json_file != "-":
        for finding in findings:
            typer.echo(f"{finding.severity}: {finding.kind}: {finding.entry}: {finding.detail}")
        typer.echo(f"{count} entries, {errors} errors, {len(findings) - errors} warnings")
    if errors:
        sys.exit(1)


@memory_app.command("eval")
def memory_eval(json_file: JsonFile = None) -> None:
    """Score the ranking on the held-out labelled queries, against each single ranker."""
    from specpilot.memory.evaluate import evaluation_results

    _results("memory-eval", "specpilot memory eval", evaluation_results(), json_file)


@memory_app.command("export")
def memory_export(folder: Annotated[Path, typer.Argument(help="a new or empty folder")]) -> None:
    """Write every entry with its revisions as reviewable files."""
    from specpilot.harness.rounds.knowledge import open_memory
    from specpilot.memory.exchange import export_entries

    with open_memory() as store:
        typer.echo(f"exported {export_entries(store, folder)} entries to {folder}")


@memory_app.command("import")
def memory_import(
    folder: Annotated[Path, typer.Argument(help="a folder of exported files")],
    skip_unverified: Annotated[
        bool, typer.Option(help="leave out entries whose receipts this ledger does not hold")
    ] = False,
) -> None:
    """Add entries and revisions from exported files; what exists stays."""
    from specpilot.harness.rounds.knowledge import open_memory
    from specpilot.memory.exchange import import_entries

    with open_memory() as store:
        done = import_entries(store, folder, skip_unverified=skip_unverified)
    typer.echo(f"{done.files} files, {done.revisions} revisions added")
    for entry in done.unverified:
        typer.echo(f"left out, its receipt does not verify: {entry}")


Source = Annotated[Path, typer.Argument(metavar="SRC", help="a Hugging Face folder")]
Target = Annotated[Path, typer.Argument(metavar="DST", help="a new or unfinished folder")]


@w12_app.command("encode")
def w12_encode(
    source: Source,
    target: Target,
    head: Annotated[bool, typer.Option(help="the LM head too, where it is not tied")] = False,
    convert_exact: Annotated[
        bool, typer.Option(help="take FP32 matrices whose values are all BF16 values")
    ] = False,
    json_file: JsonFile = None,
) -> None:
    """Write a model folder with its BF16 matrices in W12, verified as it goes; resumes."""
    from specpilot.mechanisms.w12.folder import encode_folder

    with _progress() as progress:
        found = encode_folder(
            source, target, head=head, convert_exact=convert_exact, progress=progress
        )
    _statistics(found, json_file)


@w12_app.command("decode")
def w12_decode(source: Source, target: Target) -> None:
    """Write a W12 folder back as BF16, every matrix checked."""
    from specpilot.mechanisms.w12.folder import decode_folder

    with _progress() as progress:
        count = decode_folder(source, target, progress=progress)
    typer.echo(f"{count} matrices decoded to {target}")


@w12_app.command("verify")
def w12_verify(source: Source, json_file: JsonFile = None) -> None:
    """Decode every matrix of a W12 folder and compare it with its checksum."""
    from specpilot.mechanisms.w12.folder import verify_folder

    with _progress() as progress:
        count = verify_folder(source, progress=progress)
    _write(json_file, {"path": str(source), "ok": True, "matrices": count})
    if json_file != "-":
        typer.echo(f"{count} matrices decode to the weights that were encoded")


@w12_app.command("info")
def w12_info(
    source: Source,
    picture: Annotated[
        Path | None, typer.Option(help="draw bits per weight beside the entropy bound")
    ] = None,
    json_file: JsonFile = None,
) -> None:
    """Show bits per weight, escapes and the entropy bound of every matrix."""
    from specpilot.mechanisms.w12.folder import info_folder
    from specpilot.mechanisms.w12.statistics import draw

    found = info_folder(source)
    if picture is not None:
        draw(found, picture)
    _statistics(found, json_file)


@contextlib.contextmanager
def _progress() -> Iterator[Callable[[int, int, str], None]]:
    from rich.console import Console
    from rich.progress import Progress

    with Progress(console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("", total=None)
        yield lambda done, planned, what: bar.update(
            task, completed=done, total=planned, description=what
        )


def _statistics(found: Sequence[Any], json_file: str | None) -> None:
    from dataclasses import asdict

    from rich.console import Console
    from rich.table import Table

    from specpilot.mechanisms.w12.statistics import total

    summary = total(list(found))
    _write(json_file, {"tensors": [asdict(t) for t in found], "total": asdict(summary)})
    if json_file == "-":
        return
    table = Table()
    for name in ("matrix", "shape", "bits/weight", "escapes", "BF16 rows", "entropy bound"):
        table.add_column(name, justify="left" if name == "matrix" else "right")
    for each in (*found, summary):
        shape = f"{each.rows} x {each.columns}" if each.columns else ""
        table.add_row(each.name, shape, f"{each.bits_per_weight:.3f}", str(each.escapes),
                      str(each.raw_rows), f"{each.entropy_bits:.3f}")  # fmt: skip
    Console().print(table)


def _results(
    name: str, command: str, rows: Sequence[Mapping[str, Any]], json_file: str | None
) -> None:
    from specpilot.harness import benchmarks

    payload = benchmarks.document(name, command, rows)
    if json_file != "-":
        for row in payload["results"]:
            typer.echo(f"{row['id']:60} {row['value']:.6g} {row['unit']}")
    _write(json_file, payload)


def _object(text: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except json.JSONDecodeError as error:
        raise InvalidInput(
            f"not JSON: {error}.", hint='Give an object such as {"limit": 3}.'
        ) from None
    if not isinstance(value, dict):
        raise InvalidInput(f"expected a JSON object, got {type(value).__name__}.")
    return value


def _write(path: str | None, payload: Mapping[str, Any]) -> None:
    if path:
        from specpilot.harness.benchmarks import write

        write(path, payload)
