"""``capsim doctor``: what is installed, what a server offers, and what to do about what is missing."""

from __future__ import annotations

from typing import Annotated

import typer

from capsim.measuring_options import ServerOptions, with_server
from capsim.options import SERVER, AsCsv, AsJson


@with_server
def doctor(
    *,
    endpoint: Annotated[
        str | None,
        typer.Option(metavar="URL", help="Look at this server too; a few short requests.", rich_help_panel=SERVER),
    ] = None,
    as_json: AsJson = False,
    as_csv: AsCsv = False,
    server: ServerOptions,
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

        findings += offered(endpoint, server)
    found = CheckUp(findings)
    output.tell(found)
    if found.broken:
        first = found.broken[0]
        raise CommandError(f"{first.what} {first.value}: {first.remedy}")
