"""What a check-up found: lines for people, rows and JSON for programs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Literal

from rich.table import Table
from rich.text import Text

from capsim.tables import console, plain_table
from capsim.terminal import printable

# "unknown" is what a server does not tell and capsim must assume, "optional" what is not there and need not be
State = Literal["ok", "unknown", "optional", "broken"]


@dataclass(frozen=True)
class Finding:
    """One thing that was looked at; `remedy` says what to do where it is not well."""

    section: str
    what: str
    state: State
    value: str
    remedy: str = ""


class CheckUp:
    """All findings, in the order in which they are shown."""

    def __init__(self, findings: Sequence[Finding]) -> None:
        self.findings = findings
        self.broken = [one for one in findings if one.state == "broken"]

    def content(self) -> dict[str, object]:
        counts = Counter(one.state for one in self.findings)
        return {"healthy": not self.broken, "counts": dict(counts), "findings": self.rows()}

    def rows(self) -> list[dict[str, object]]:
        return [asdict(one) for one in self.findings]

    def show(self) -> None:
        screen = console()
        for section in dict.fromkeys(one.section for one in self.findings):
            table = plain_table(section)
            table.add_column("", no_wrap=True)
            table.add_column("", no_wrap=True)
            table.add_column("", overflow="fold")
            for one in self.findings:
                if one.section == section:
                    table.add_row(one.what, one.state, Text(printable(one.value)))
            table.show_header = False
            screen.print(table)
            screen.print()
        remedies = Table("", "", title="What to do", title_justify="left", box=None, show_header=False, pad_edge=False)
        for one in self.findings:
            if one.remedy:
                remedies.add_row(one.what, Text(printable(one.remedy)))
        if remedies.row_count:
            screen.print(remedies)
