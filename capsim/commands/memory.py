"""``capsim memory``: where a GPU's memory goes, and the KV pool that other flags would leave."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from capsim.completion import complete_gpu, complete_model
from capsim.options import ENGINE, AsCsv, AsJson
from capsim.terminal import echo

if TYPE_CHECKING:
    from simulator.hardware.kv_layout import KvPool
    from simulator.hardware.memory import MemoryAccount, MemoryFlags

# lines of the account, as vLLM's log words them
LINES = {
    "total": "GPU memory",
    "free": "free at the start",
    "requested": "requested by utilization",
    "weights": "  weights",
    "consumed": "weights and non-torch",
    "activation": "peak activation",
    "graphs": "CUDA graphs",
    "kv_cache": "KV cache",
    "unused": "unused",
}


Utilization = Annotated[
    str | None, typer.Option(metavar="N", help="Share of the GPU's memory to use.", rich_help_panel=ENGINE)
]
KvBytes = Annotated[
    str | None, typer.Option(metavar="N", help="KV pool in bytes: 6569114112 or 6.12GiB.", rich_help_panel=ENGINE)
]
KvBlocks = Annotated[str | None, typer.Option(metavar="N", help="KV pool in blocks.", rich_help_panel=ENGINE)]
BatchedTokens = Annotated[str | None, typer.Option(metavar="N", help="Most tokens in a step.", rich_help_panel=ENGINE)]
Sequences = Annotated[str | None, typer.Option(metavar="N", help="Most sequences in a step.", rich_help_panel=ENGINE)]
ModelLength = Annotated[str | None, typer.Option(metavar="N", help="Most tokens of a request.", rich_help_panel=ENGINE)]
BlockSize = Annotated[str | None, typer.Option(metavar="N", help="Tokens of a KV block.", rich_help_panel=ENGINE)]
KvType = Annotated[
    str | None, typer.Option(metavar="NAME", help="auto, bfloat16, fp8, or fp8_ds_mla for MLA.", rich_help_panel=ENGINE)
]
Ranks = Annotated[str | None, typer.Option(metavar="N", help="GPUs that share the model.", rich_help_panel=ENGINE)]


def memory(
    *,
    server_log: Annotated[
        Path | None, typer.Option("--server-log", metavar="FILE", help="What vllm serve printed: then it is measured.")
    ] = None,
    model: Annotated[
        str | None,
        typer.Option(
            "--model",
            metavar="NAME",
            help="A known model, or the path of its config.json.",
            autocompletion=complete_model,
        ),
    ] = None,
    gpu: Annotated[
        str | None,
        typer.Option("--gpu", metavar="NAME", help="Such as 4090 or A100-SXM4-80GB.", autocompletion=complete_gpu),
    ] = None,
    tokens: Annotated[
        int | None,
        typer.Option(
            "--tokens", min=1, metavar="N", help="Requests of how many tokens to count; max_model_len unless given."
        ),
    ] = None,
    gpu_memory_utilization: Utilization = None,
    kv_cache_memory_bytes: KvBytes = None,
    num_gpu_blocks_override: KvBlocks = None,
    max_num_batched_tokens: BatchedTokens = None,
    max_num_seqs: Sequences = None,
    max_model_len: ModelLength = None,
    block_size: BlockSize = None,
    kv_cache_dtype: KvType = None,
    tensor_parallel_size: Ranks = None,
    as_json: AsJson = False,
    as_csv: AsCsv = False,
) -> None:
    """Show the account of a GPU's memory as vLLM's log does, and the KV pool: blocks, tokens, requests.

    With --server-log it is measured, and flags show what they would change. Without, --model and --gpu estimate it.
    """
    from capsim.errors import CommandError
    from capsim.output import Output

    Output(as_json, as_csv)  # refuses both
    given = {
        "gpu_memory_utilization": gpu_memory_utilization,
        "kv_cache_memory_bytes": kv_cache_memory_bytes,
        "num_gpu_blocks_override": num_gpu_blocks_override,
        "max_num_batched_tokens": max_num_batched_tokens,
        "max_num_seqs": max_num_seqs,
        "max_model_len": max_model_len,
        "block_size": block_size,
        "kv_cache_dtype": kv_cache_dtype,
        "tensor_parallel_size": tensor_parallel_size,
    }
    changes = {name: value for name, value in given.items() if value is not None}
    if server_log is not None:
        if gpu is not None:
            raise CommandError("give either --server-log or --gpu: the log tells the memory of its GPU")
        cases, notes = _from_log(server_log, model, changes)
    elif model is None or gpu is None:
        raise CommandError("give --server-log FILE, or --model and --gpu to estimate")
    else:
        cases, notes = _estimated(model, gpu, changes)
    if as_json:
        _print_json(cases, notes, tokens)
    elif as_csv:
        _print_csv(cases, tokens)
    else:
        _print_table(cases, notes, tokens)


Case = tuple[str, "MemoryAccount", "MemoryFlags", "KvPool"]


def _from_log(path: Path, model: str | None, changes: dict[str, str]) -> tuple[list[Case], list[str]]:
    """The account as logged, and under the changed flags if there are any."""
    from calibration.server_log import read_server_log
    from calibration.server_memory import server_memory
    from simulator.hardware.memory import account_under, kv_layout_of, layout_after, pool_of
    from simulator.hardware.model_config import find_model

    server = server_memory(read_server_log(path), find_model(model) if model else None)
    pool = server.layout.pool(server.account.kv_cache, server.flags.max_model_len, server.flags.tokens_in_flight)
    cases: list[Case] = [("as logged", server.account, server.flags, pool)]
    if changes:
        flags = server.flags.changed(changes)
        if server.model is not None:
            layout = kv_layout_of(server.model, flags)
        else:
            layout = layout_after(server.flags, flags, server.layout.bytes_per_token, None)
        account = account_under(server.account, server.flags, flags, server.model, layout)
        cases.append(("changed", account, flags, pool_of(account, flags, layout)))
    return cases, list(server.notes)


def _estimated(model_name: str, gpu_name: str, changes: dict[str, str]) -> tuple[list[Case], list[str]]:
    from calibration.server_memory import default_flags
    from simulator.hardware.gpus import find_gpu
    from simulator.hardware.memory import MemoryFlags, estimated_account, kv_layout_of, pool_of
    from simulator.hardware.model_config import find_model

    model, gpu = find_model(model_name), find_gpu(gpu_name)
    stated = MemoryFlags().changed(changes)
    batch = {name: getattr(stated, name) for name in ("max_num_seqs", "max_num_batched_tokens") if name in changes}
    length = stated.max_model_len if "max_model_len" in changes else model.max_model_len or None
    defaults, notes = default_flags(gpu, max_model_len=length, **batch)
    flags = defaults.changed(changes)
    account = estimated_account(model, gpu, flags)
    notes = [f"assumed is {sentence}" for sentence in notes] + list(model.notes)
    notes.append(
        "nothing of this is measured: on a small GPU 0.7 GiB more or less is much. Start the server once and give what "
        "it prints with --server-log: that tells the pool, and the --kv-cache-memory that fits"
    )
    return [("estimated", account, flags, pool_of(account, flags, kv_layout_of(model, flags)))], notes


# --- what is shown


def _bytes(account: MemoryAccount) -> dict[str, int | None]:
    return {name: getattr(account, name) for name in LINES}


def _pool_facts(account: MemoryAccount, pool: KvPool, tokens: int | None) -> dict[str, int | float | None]:
    length = tokens or pool.max_model_len
    return {
        "block_bytes": pool.layout.block_bytes,
        "num_gpu_blocks": pool.num_gpu_blocks,
        "block_size": pool.layout.block_size,
        "kv_bytes_per_token": pool.layout.bytes_per_token,
        "kv_tokens": pool.tokens,
        "max_model_len": pool.max_model_len,
        "max_concurrency": pool.max_concurrency,
        "request_tokens": length,
        "requests": pool.requests(length),
        # an estimate gives no advice: a server that takes it may run out of memory
        "kv_bytes_as_requested": None if account.estimated else account.kv_bytes_as_requested,
        "kv_bytes_to_fill": None if account.estimated else account.kv_bytes_to_fill,
    }


def _print_json(cases: list[Case], notes: list[str], tokens: int | None) -> None:
    from dataclasses import asdict

    from capsim.output import json_text

    shown = [
        {
            "case": name,
            "flags": asdict(flags),
            "bytes": _bytes(account),
            "estimated": sorted(account.estimated),
            "pool": _pool_facts(account, pool, tokens),
        }
        for name, account, flags, pool in cases
    ]
    echo(json_text({"cases": shown, "notes": notes}))


def _print_csv(cases: list[Case], tokens: int | None) -> None:
    echo("case,quantity,value,origin")
    for name, account, _, pool in cases:
        for line, size in (_bytes(account) | _pool_facts(account, pool, tokens)).items():
            origin = "estimated" if line in account.estimated else "measured" if line in LINES else "derived"
            echo(f"{name},{line},{'' if size is None else size},{origin}")


def _print_table(cases: list[Case], notes: list[str], tokens: int | None) -> None:
    from capsim.tables import console, plain_table

    table = plain_table("Memory of one GPU")
    table.add_column("", no_wrap=True)
    for name, *_ in cases:
        table.add_column(name, justify="right", no_wrap=True)
    for line, label in LINES.items():
        if any(_bytes(account)[line] is not None for _, account, _, _ in cases):
            table.add_row(label, *(_gib(account, line) for _, account, _, _ in cases))
    table.add_section()
    facts = [_pool_facts(account, pool, tokens) for _, account, _, pool in cases]
    length = f"{facts[0]['request_tokens']:,}" if len({fact["request_tokens"] for fact in facts}) == 1 else "full"
    for label, name, form in (
        ("KV bytes per token", "kv_bytes_per_token", ",d"),
        ("GPU KV blocks", "num_gpu_blocks", ",d"),
        ("GPU KV cache size, tokens", "kv_tokens", ",d"),
        ("max concurrency at max_model_len", "max_concurrency", ".2f"),
        (f"requests of {length} tokens that fit", "requests", ",d"),
    ):
        table.add_row(label, *(format(fact[name], form) for fact in facts))
    screen = console()
    screen.print(table)
    _print_advice(cases[0][1], screen)
    if any(account.estimated for _, account, _, _ in cases):
        screen.print("~ is estimated; the rest is measured, stated or follows from it.")
    for note in notes:
        screen.print(f"Note: {note}", markup=False)


def _print_advice(account: MemoryAccount, screen: Any) -> None:
    """What would fill the GPU, where that is known and not estimated."""
    if not account.estimated and account.kv_bytes_to_fill > account.kv_cache:
        screen.print(
            f"--kv-cache-memory={account.kv_bytes_to_fill} would use what is unused: "
            f"{account.kv_bytes_to_fill / 2**30:.2f} GiB.",
            markup=False,
        )


def _gib(account: MemoryAccount, line: str) -> str:
    size = _bytes(account)[line]
    unsure = line in account.estimated or (line == "unused" and bool(account.estimated))
    return "-" if size is None else f"{'~ ' if unsure else ''}{size / 2**30:.2f} GiB"
