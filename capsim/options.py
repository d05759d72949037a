"""Options that several commands share, and how their texts become values."""

from __future__ import annotations

import functools
import inspect
import os
import re
import stat
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer

from capsim.completion import complete_gpu, complete_profile
from capsim.terminal import echo

if TYPE_CHECKING:
    from simulator.loads.workload import Shape

Number = TypeVar("Number", int, float)

MOST_SECONDS = 1e9  # of a time limit, before its unit
INPUT_LEN, OUTPUT_LEN = 1024, 256  # tokens, unless given
KEY_BYTES = 1 << 14  # of a file with a key; a long token has two thousand
LOAD, OUTPUT, SERVER = "Load", "Output", "Server"
ENGINE = "Engine flags, under vLLM's names"


def _at_least_one(value: int | None) -> int | None:
    if value is not None and value < 1:
        raise typer.BadParameter(f"{value} is not at least 1")
    return value


ProfileName = Annotated[
    str,
    typer.Option(
        "--profile",
        metavar="FILE",
        help="Profile of the server: a file, or a shipped name.",
        autocompletion=complete_profile,
    ),
]
Concurrency = Annotated[
    str | None,
    typer.Option(metavar="N,N,...", help="Closed loop: numbers of clients, one level each.", rich_help_panel=LOAD),
]
RequestRate = Annotated[
    str | None,
    typer.Option(metavar="R,R,...", help="Open loop: requests per second, one level each.", rich_help_panel=LOAD),
]
Burstiness = Annotated[
    float,
    typer.Option(help="Open loop: 1 for Poisson, below it burstier, inf for even spacing.", rich_help_panel=LOAD),
]
InputLen = Annotated[int | None, typer.Option(help="Prompt tokens; 1024 unless given.", rich_help_panel=LOAD)]
OutputLen = Annotated[int | None, typer.Option(help="Output tokens; 256 unless given.", rich_help_panel=LOAD)]
RangeRatio = Annotated[
    float, typer.Option(help="Spread of both lengths, 0.1 for 10 % up and down.", rich_help_panel=LOAD)
]
Shapes = Annotated[
    str | None,
    typer.Option(
        metavar="IN/OUT:SHARE,...",
        help="Mixed lengths instead, such as 512/128:0.7,4096/256:0.3.",
        rich_help_panel=LOAD,
    ),
]
Seed = Annotated[int, typer.Option(min=0, help="The same seed draws the same load.", rich_help_panel=LOAD)]
OtherGpu = Annotated[
    str | None,
    typer.Option(
        "--gpu",
        metavar="NAME",
        help="On another GPU than the measured one, such as 4090 or H100-SXM.",
        autocompletion=complete_gpu,
    ),
]
TensorParallel = Annotated[
    int | None,
    typer.Option(
        "--tensor-parallel-size",
        metavar="N",
        help="GPUs that share the model.",
        rich_help_panel=ENGINE,
        callback=_at_least_one,  # and no `min`, whose range would cut the names of the panel in 80 columns
    ),
]
Targets = Annotated[
    str | None,
    typer.Option("--slo", metavar="NAME:MS,...", help="Targets in ms, such as p99_ttft:2000,p99_itl:100."),
]
NumPrompts = Annotated[
    int | None,
    typer.Option(min=1, metavar="N", help="Requests of each level; else as time allows.", rich_help_panel=LOAD),
]
RequestsPerClient = Annotated[
    int | None,
    typer.Option(min=1, metavar="N", help="Closed loop: requests for each client.", rich_help_panel=LOAD),
]
# What every command takes that makes levels, each option with its default.
LEVEL_OPTIONS: dict[str, tuple[Any, Any]] = {
    "concurrency": (Concurrency, None),
    "request_rate": (RequestRate, None),
    "burstiness": (Burstiness, 1.0),
    "input_len": (InputLen, None),
    "output_len": (OutputLen, None),
    "range_ratio": (RangeRatio, 0.0),
    "shapes": (Shapes, None),
}
SaveDir = Annotated[
    Path | None, typer.Option("--save", metavar="DIR", help="Save the run, all tables, here.", rich_help_panel=OUTPUT)
]
Overwrite = Annotated[bool, typer.Option("--overwrite", help="Replace an earlier run there.", rich_help_panel=OUTPUT)]
AsJson = Annotated[
    bool, typer.Option("--json", help="Print JSON, times in seconds, instead of tables.", rich_help_panel=OUTPUT)
]
AsCsv = Annotated[
    bool, typer.Option("--csv", help="Print CSV, times in seconds, instead of tables.", rich_help_panel=OUTPUT)
]
Intervals = Annotated[
    bool,
    typer.Option(
        "--intervals/--no-intervals", help="90 % intervals; without them it is faster.", rich_help_panel=OUTPUT
    ),
]
Endpoint = Annotated[
    str,
    typer.Option(metavar="URL", help="The server's address, such as http://localhost:8000.", rich_help_panel=SERVER),
]
Model = Annotated[
    str | None,
    typer.Option(metavar="NAME", help="Model to ask for, else the first served.", rich_help_panel=SERVER),
]
ApiKeyFile = Annotated[
    Path | None,
    typer.Option(metavar="FILE", help="File with the API key; else OPENAI_API_KEY.", rich_help_panel=SERVER),
]

Insecure = Annotated[
    bool, typer.Option("--insecure", help="Take a TLS certificate of unknown origin.", rich_help_panel=SERVER)
]
ServerLog = Annotated[
    Path | None,
    typer.Option(metavar="FILE", help="The server's log: it tells flags and memory.", rich_help_panel=SERVER),
]
DcgmUrl = Annotated[
    str | None,
    typer.Option(metavar="URL", help="DCGM exporter that tells the GPU.", rich_help_panel=SERVER),
]
Resume = Annotated[
    bool, typer.Option("--resume", help="Continue an interrupted measurement: keep its finished levels.")
]


def _size(flag: str, text: str) -> Any:
    return Annotated[str | None, typer.Option(flag, metavar="N", help=text, rich_help_panel=ENGINE)]


def _switch(flag: str, text: str) -> Any:
    return Annotated[bool, typer.Option(flag, help=text, rich_help_panel=ENGINE)]


# Options of every command that takes engine flags. Sizes may be written as vLLM reads them: 2048, 8k, 10G, 6.12GiB.
ENGINE_FLAGS = {
    "max_num_seqs": _size("--max-num-seqs", "Most sequences in a step."),
    "max_num_batched_tokens": _size("--max-num-batched-tokens", "Most tokens in a step."),
    "max_model_len": _size("--max-model-len", "Most tokens of a request."),
    "kv_cache_memory_bytes": _size("--kv-cache-memory-bytes", "KV pool in bytes: 6569114112 or 6.12GiB."),
    "num_gpu_blocks_override": _size("--num-gpu-blocks-override", "KV pool in blocks."),
    "block_size": _size("--block-size", "Tokens of a KV block."),
    "long_prefill_token_threshold": _size(
        "--long-prefill-token-threshold", "Most prompt tokens of a request in a step."
    ),
    "scheduling_policy": Annotated[
        str | None,
        typer.Option("--scheduling-policy", metavar="NAME", help="fcfs or priority.", rich_help_panel=ENGINE),
    ],
}
ENGINE_SWITCHES = {
    "enable_chunked_prefill": _switch("--enable-chunked-prefill", "Split long prompts over steps."),
    "no_enable_chunked_prefill": _switch("--no-enable-chunked-prefill", "Compute a prompt in one step."),
    "enable_prefix_caching": _switch("--enable-prefix-caching", "Keep KV blocks of prompts to find them again."),
    "no_enable_prefix_caching": _switch("--no-enable-prefix-caching", "Forget KV blocks when a request ends."),
    "enforce_eager": _switch("--enforce-eager", "Run without CUDA graphs."),
    "async_scheduling": _switch("--async-scheduling", "Plan a step while the last one runs."),
    "no_async_scheduling": _switch("--no-async-scheduling", "Plan a step when the last one has ended."),
}


ENGINE_OPTIONS = {name: (option, None) for name, option in ENGINE_FLAGS.items()} | {
    name: (option, False) for name, option in ENGINE_SWITCHES.items()
}


def with_engine_flags(command: Callable[..., None]) -> Callable[..., None]:
    """Give a command the options above; its parameter `flags` gets those that were set, by the option's name."""
    return with_options(command, "flags", ENGINE_OPTIONS, set_flags)


def with_options(
    command: Callable[..., None],
    parameter: str,
    options: Mapping[str, tuple[Any, Any]],
    read: Callable[[Mapping[str, Any]], object],
) -> Callable[..., None]:
    """Give a command `options`, each with its type and its default, in place of a parameter that gets what `read`
    makes of their values."""
    own = inspect.signature(command, eval_str=True)
    kept = [one for name, one in own.parameters.items() if name != parameter]
    added = [
        inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation)
        for name, (annotation, default) in options.items()
    ]

    @functools.wraps(command)
    def with_them(**values: Any) -> None:
        command(
            **{one.name: values[one.name] for one in kept},
            **{parameter: read({name: values[name] for name in options})},
        )

    # Typer reads the options from here
    with_them.__signature__ = inspect.Signature([*kept, *added])  # type: ignore[attr-defined]
    with_them.__annotations__ = {one.name: one.annotation for one in [*kept, *added]}
    return with_them


def set_flags(values: Mapping[str, Any]) -> dict[str, Any]:
    """Those engine flags that were given, as ``--max-num-seqs``."""
    flags = {name: values[name] for name in ENGINE_FLAGS if values[name] is not None}
    for name in ENGINE_SWITCHES:
        if values[name]:
            flag = name.removeprefix("no_")
            if flag in flags:
                raise typer.BadParameter("given together with its opposite", param_hint=f"--{flag.replace('_', '-')}")
            flags[flag] = flag == name
    return {f"--{name.replace('_', '-')}": value for name, value in flags.items()}


def integers(option: str, text: str) -> list[int]:
    """Whole numbers from ``1,2,4``."""
    return _numbers(option, text, int, "whole numbers such as 1,2,4")


def reals(option: str, text: str) -> list[float]:
    """Numbers from ``0.5,1,2.5``."""
    return _numbers(option, text, float, "numbers such as 0.5,1,2.5")


def _numbers(option: str, text: str, kind: type[Number], wanted: str) -> list[Number]:
    try:
        return [kind(part) for part in text.split(",")]
    except ValueError:
        raise typer.BadParameter(f"{text!r} is not a list of {wanted}", param_hint=option) from None


def request_shapes(
    input_len: int | None, output_len: int | None, range_ratio: float, shapes: str | None
) -> list[Shape]:
    """Kinds of requests from the options that describe them."""
    from simulator.loads.levels import LoadError, parse_shapes, uniform_shape
    from simulator.loads.workload import Length

    try:
        if shapes is None:
            prompt, output = Length.fixed(_or(input_len, INPUT_LEN)), Length.fixed(_or(output_len, OUTPUT_LEN))
            return [uniform_shape(prompt, output, range_ratio)]
        if input_len is not None or output_len is not None or range_ratio:
            raise LoadError("give either --shapes, or --input-len, --output-len and --range-ratio")
        return parse_shapes(shapes)
    except ValueError as problem:
        raise typer.BadParameter(str(problem), param_hint="the load") from None


def _or(value: int | None, default: int) -> int:
    return default if value is None else value


def seconds_of(option: str, text: str) -> float:
    """Seconds from ``300``, ``300s``, ``5m`` or ``1.5h``."""
    found = re.fullmatch(r"\s*(\d+(?:\.\d*)?)\s*([smh]?)\s*", text)
    if not found or not 0 < float(found[1]) <= MOST_SECONDS:
        raise typer.BadParameter(f"{text!r} is not a time such as 5m or 300s", param_hint=option)
    return float(found[1]) * {"": 1, "s": 1, "m": 60, "h": 3600}[found[2]]


def read_key(file: Path | None) -> str | None:
    """The API key in `file`, None without one. Says on stderr where everyone on this machine can read it."""
    if file is None:
        return None
    with file.open("rb") as opened:
        content, mode = opened.read(KEY_BYTES + 1), os.fstat(opened.fileno()).st_mode
    if len(content) > KEY_BYTES:
        raise typer.BadParameter(
            f"{file} holds no key: it is larger than {KEY_BYTES} bytes", param_hint="--api-key-file"
        )
    key = content.decode(errors="replace").strip()
    if not key:
        raise typer.BadParameter(f"{file} is empty", param_hint="--api-key-file")
    if os.name == "posix" and mode & stat.S_IROTH:
        echo(f"Note: every user of this machine can read the key in {file}: chmod 600 {file}", err=True)
    return key
