"""``capsim doctor``: what is installed, what a server offers, and what to do about what is missing."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from capsim.options import (
    SERVER,
    ApiKeyFile,
    AsCsv,
    AsJson,
    DcgmUrl,
    Insecure,
    Model,
    ServerLog,
    read_key,
    with_engine_flags,
)


@with_engine_flags
def doctor(
    *,
    endpoint: Annotated[
        str | None,
        typer.Option(metavar="URL", help="Look at this server too; a few short requests.", rich_help_panel=SERVER),
    ] = None,
    model: Model = None,
    api_key_file: ApiKeyFile = None,
    insecure: Insecure = False,
    server_log: ServerLog = None,
    dcgm_url: DcgmUrl = None,
    as_json: AsJson = False,
    as_csv: AsCsv = False,
    flags: dict[str, Any],
) -> None:
    """Look at this installation and at a server: what is there, what is missing, and what to do about it.

    Of a server: its models, version and KV pool, how prompts and token counts go, which flags it tells and which are
    yours to give. Exit code 1 where a package is missing or the server cannot be measured.
    """
    from capsim.errors import CommandError
    from capsim.findings import CheckUp
    from capsim.installation import installed
    from capsim.output import Output

    output = Output(as_json, as_csv)
    findings = installed()
    if endpoint is not None:
        from capsim.endpoint_checkup import offered
        from capsim.measuring import ServerOptions

        key = read_key(api_key_file)
        findings += offered(ServerOptions(endpoint, model, key, insecure, flags, server_log, dcgm_url))
    found = CheckUp(findings)
    output.tell(found)
    if found.broken:
        first = found.broken[0]
        raise CommandError(f"{first.what} {first.value}: {first.remedy}")
