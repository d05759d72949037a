"""The command line. Heavy modules are imported by the commands that need them, so that help comes at once."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Annotated, Any

import typer
from typer.core import TyperGroup, TyperOption

from capsim import __version__
from capsim.commands.calibrate import calibrate
from capsim.commands.capacity import capacity
from capsim.commands.doctor import doctor
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
from capsim.exit_codes import ExitCode
from capsim.terminal import echo

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

EXIT_CODES = "\n".join(["Exit codes", *(f"{code:4d} {code.meaning.replace('`', '')}" for code in ExitCode)])

# Every command by what it is for, with an example that runs as it is where its files and servers are there.
SHIPPED = "--profile rtx4090-qwen2.5-7b"
COMMANDS: Mapping[str, Sequence[tuple[Callable[..., None], str]]] = {
    "Measure a server": (
        (calibrate, "capsim calibrate --endpoint http://localhost:8000 -o my-server.yaml"),
        (sweep, "capsim sweep --endpoint localhost:8000 --concurrency 2,16,32 -o measured"),
        (import_, "capsim import result.json -o measured"),
        (validate, "capsim validate --profile my-server.yaml measured"),
    ),
    "Ask what would be": (
        (simulate, "capsim simulate rtx4090-qwen2.5-7b"),
        (predict, f"capsim predict {SHIPPED} --slo p99_ttft:2000"),
        (what_if, f"capsim what-if {SHIPPED} --alt '--max-num-seqs 16'"),
        (capacity, f"capsim capacity {SHIPPED} --slo p99_ttft:2000"),
        (memory, "capsim memory --model Qwen2.5-7B-Instruct --gpu 4090"),
        (
            optimize,
            f"capsim optimize {SHIPPED} --slo p99_itl:250 \\\n    --request-rate 6 --replicas 1..4",
        ),
    ),
    "See why, and show it": (
        (explain, "capsim explain rtx4090-qwen2.5-7b --level C=16"),
        (report, "capsim report measured --profile my-server.yaml -o report.html"),
    ),
    "Set up and try": (
        (doctor, "capsim doctor --endpoint http://localhost:8000"),
        (emulate, f"capsim emulate {SHIPPED} --port 8000"),
    ),
}


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

    def get_params(self, ctx: Any) -> list[Any]:
        """The options. That which prints the completion is for those who look for it, not for the help."""
        params = super().get_params(ctx)
        for param in params:
            if isinstance(param, TyperOption) and param.name == "show_completion":
                param.hidden = True
        return params


@contextmanager
def one_line_errors() -> Iterator[None]:
    """Turn an interrupt or an expected error into a line on stderr and an exit code; bugs keep their traceback."""
    try:
        yield
    except KeyboardInterrupt as interrupt:
        echo(f"interrupted{': ' if interrupt.args else ''}{' '.join(map(str, interrupt.args))}", err=True)
        raise typer.Exit(ExitCode.INTERRUPTED) from None
    except (typer.Exit, typer.Abort, BrokenPipeError):
        raise
    except Exception as error:
        message = user_message(error)
        if message is None:
            raise
        echo(f"error: {message}", err=True)
        raise typer.Exit(getattr(error, "exit_code", ExitCode.FAILED)) from None


app = typer.Typer(
    cls=OneLineErrors,
    no_args_is_help=True,
    epilog=EXIT_CODES,
    pretty_exceptions_enable=False,
    context_settings={"token_normalize_func": canonical_name, "help_option_names": ["-h", "--help"]},
)
for _group, _commands in COMMANDS.items():
    for _command, _example in _commands:
        _name = _command.__name__.rstrip("_").replace("_", "-")
        app.command(_name, epilog=f"Example:\n{_example}", rich_help_panel=_group)(_command)


def _show_version(wanted: bool) -> None:
    if wanted:
        echo(f"capsim {__version__}")
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
