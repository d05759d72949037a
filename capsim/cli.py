"""The command line. Heavy modules are imported by the commands that need them, so that help comes at once."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from capsim import __version__
from capsim.commands.calibrate import calibrate
from capsim.commands.capacity import capacity
from capsim.commands.emulate import emulate
from capsim.commands.explain import explain
from capsim.commands.import_ import import_
from capsim.commands.memory import memory
from capsim.commands.optimize import optimize
from capsim.commands.predict import predict
from capsim.commands.report import report
from capsim.commands.simulate import simulate
from capsim.commands.sweep import sweep
from capsim.commands.validate import validate
from capsim.commands.what_if import what_if
from capsim.errors import user_message

FAILED, INTERRUPTED = 1, 130

# What other load generators and vLLM's own parser call our options.
SYNONYMS = {
    "base-url": "endpoint",
    "url": "endpoint",
    "target": "endpoint",
    "max-concurrency": "concurrency",
    "random-input-len": "input-len",
    "isl": "input-len",
    "random-output-len": "output-len",
    "osl": "output-len",
    "random-range-ratio": "range-ratio",
    "kv-cache-memory": "kv-cache-memory-bytes",
}

EPILOG = (
    "Exit codes: 0 done; 1 failed, with one line on stderr that says why; 2 wrong usage; 130 interrupted, what was "
    "measured is kept."
)


def canonical_name(name: str) -> str:
    """The name of an option as it is declared: underscores and synonyms are understood, as vLLM's parser does."""
    name = name.replace("_", "-")
    return SYNONYMS.get(name, name)


class OneLineErrors(TyperGroup):
    """Ends on an expected error with one line on stderr instead of a traceback."""

    def make_context(self, info_name: str | None, args: list[str], *rest: Any, **extra: Any) -> Any:
        if not args:
            return super().make_context(info_name, args, *rest, **extra)  # shows the help
        with one_line_errors():
            return super().make_context(info_name, args, *rest, **extra)

    def invoke(self, ctx: Any) -> Any:
        with one_line_errors():
            return super().invoke(ctx)


@contextmanager
def one_line_errors() -> Iterator[None]:
    """Turn an interrupt or an expected error into a line on stderr and an exit code; bugs keep their traceback."""
    try:
        yield
    except KeyboardInterrupt as interrupt:
        typer.echo(f"interrupted{': ' if interrupt.args else ''}{' '.join(map(str, interrupt.args))}", err=True)
        raise typer.Exit(INTERRUPTED) from None
    except (typer.Exit, typer.Abort, BrokenPipeError):
        raise
    except Exception as error:
        message = user_message(error)
        if message is None:
            raise
        typer.echo(f"error: {message}", err=True)
        raise typer.Exit(getattr(error, "exit_code", FAILED)) from None


app = typer.Typer(
    cls=OneLineErrors,
    no_args_is_help=True,
    add_completion=False,
    epilog=EPILOG,
    pretty_exceptions_enable=False,
    context_settings={"token_normalize_func": canonical_name, "help_option_names": ["-h", "--help"]},
)
for command in (simulate, predict, validate, sweep, calibrate):
    app.command(epilog=EPILOG)(command)
app.command(epilog=EPILOG)(capacity)
app.command(epilog=EPILOG)(memory)
app.command(epilog=EPILOG)(explain)
app.command(epilog=EPILOG)(report)
app.command(epilog=EPILOG)(optimize)
app.command(epilog=EPILOG)(emulate)
app.command("what-if", epilog=EPILOG)(what_if)
app.command("import", epilog=EPILOG)(import_)


def _show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"capsim {__version__}")
        raise typer.Exit


@app.callback()
def capsim(
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    """Will this LLM server hold this load, and what would another flag or another load do?

    Measures a live vLLM endpoint, fits how long the engine's steps take, and predicts latency and throughput.
    """


def main() -> None:
    """The ``capsim`` command."""
    app()
