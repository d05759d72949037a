"""``capsim emulate``: a server without a GPU that takes the time of a profile's server."""

from __future__ import annotations

import os
from contextlib import suppress
from typing import TYPE_CHECKING, Annotated, Any

import typer

from capsim.options import SERVER, ProfileName, with_engine_flags
from capsim.terminal import echo

if TYPE_CHECKING:
    from capsim.emulator.server import Twin


@with_engine_flags
def emulate(
    profile: ProfileName,
    *,
    host: Annotated[
        str, typer.Option(help="Address to listen at; others than your own machine can reach 0.0.0.0.")
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port to listen at, 0 for any free one.")] = 8000,
    speed: Annotated[
        float,
        typer.Option(metavar="X", help="Run X times faster than real time; all times are X times shorter."),
    ] = 1.0,
    served_model_name: Annotated[
        str | None, typer.Option(metavar="NAME", help="Name of the model, else the profile's.", rich_help_panel=SERVER)
    ] = None,
    output_len: Annotated[
        int,
        typer.Option(
            min=1, metavar="N", help="Tokens of an answer whose request sets no max_tokens.", rich_help_panel=SERVER
        ),
    ] = 256,
    flags: dict[str, Any],
) -> None:
    """Serve an OpenAI-compatible API, as vLLM does, with the timing of a profile and without a GPU. Ctrl-C ends it.

    With VLLM_SERVER_DEV_MODE=1 in the environment it shows its flags on /server_info, as vLLM does.
    """
    import asyncio

    from capsim.emulator.server import Twin
    from capsim.shipped import find_profile
    from simulator.flags.vllm_flags import change_flags

    if not 0 < speed < float("inf"):
        raise typer.BadParameter(f"{speed} is not a positive number", param_hint="--speed")
    server = find_profile(profile)
    twin = Twin(
        server,
        change_flags(server.engine_flags, flags, server.kv_bytes_per_token),
        model=served_model_name,
        speed=speed,
        output_len=output_len,
        dev_mode=os.environ.get("VLLM_SERVER_DEV_MODE") == "1",
    )
    asyncio.run(_serve(twin, host, port))


async def _serve(twin: Twin, host: str, port: int) -> None:
    """Serve until SIGINT or SIGTERM. Raises `CommandError` where the address cannot be had."""
    import asyncio
    import signal

    from calibration.gpu import is_this_machine
    from capsim.errors import CommandError

    async with twin:
        try:
            url = await twin.listen(host, port)
        except OSError as error:
            reason = (os.strerror(error.errno) if error.errno and error.errno > 0 else str(error)).lower()
            raise CommandError(f"cannot listen at {host}:{port} ({reason}): give another --port or --host") from None
        hurry = f", {twin.speed:g} times faster than real time" if twin.speed != 1 else ""
        echo(f"{twin.model} is served at {url}{hurry}; Ctrl-C ends it")
        if not is_this_machine(host):
            echo("Note: whoever reaches this address can use the twin, which asks for no key", err=True)
        serving = asyncio.ensure_future(twin.wait())
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, serving.cancel)
        with suppress(asyncio.CancelledError):
            await serving
