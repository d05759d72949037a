"""The capacity of several servers side by side: tables and sentences for people, rows and JSON for programs."""

from __future__ import annotations

from collections.abc import Sequence

from rich.table import Table

from capsim.capacity_answer import CapacityAnswer
from capsim.tables import NOTHING, console, digits, plain_table, share_of_pool, whole
from capsim.what_if_answer import server_keys
from simulator.planning.alternative import Alternative
from simulator.planning.targets import targets_label


class CapacitiesAnswer:
    """One search for each server, the first of which is what the others are compared with."""

    def __init__(self, servers: Sequence[Alternative], answers: Sequence[CapacityAnswer]) -> None:
        self.servers, self.answers = servers, answers
        self.keys = ["baseline", *server_keys(servers[1:])]

    # --- for programs

    def content(self) -> dict[str, object]:
        return {
            "servers": [
                {
                    "name": server.name,
                    "gpu": server.profile.gpu,
                    "times_baseline": self._ratio(answer),
                    **answer.content(),
                    "assumed": list(server.assumed),
                    "server_notes": list(server.notes),
                }
                for server, answer in zip(self.servers, self.answers, strict=True)
            ]
        }

    def rows(self) -> list[dict[str, object]]:
        """Every level tried of every server."""
        return [
            {"server": server.name, **row}
            for server, answer in zip(self.servers, self.answers, strict=True)
            for row in answer.rows()
        ]

    # --- for people

    def show(self) -> None:
        screen = console()
        search, wanted = self.answers[0].search, targets_label(self.answers[0].first.targets)
        loop = "requests/s" if search.is_open else "clients"
        screen.print(
            f"Capacity of {self.servers[0].profile.model}, the most {loop} that meet {wanted}, "
            f"{search.load.lengths_label} tokens",
            markup=False,
        )
        for key, server in zip(self.keys, self.servers, strict=True):
            on = f" ({server.profile.gpu})" if server.profile.gpu else ""
            screen.print(f"  {key}" + (f": {server.name}{on}" if key != server.name else on), markup=False)
        screen.print()
        screen.print(self._table())
        screen.print()
        for key, answer in zip(self.keys, self.answers, strict=True):
            sentence = answer.why() or f"{answer.first.ceilings.sentence()}."
            screen.print(f"{key}: {answer.verdict()} {sentence}", markup=False)
        screen.print(self.answers[0].counted(), markup=False)
        self._show_trust()

    def _table(self) -> Table:
        table = plain_table("Capacity, what comes with it, and the level to run at")
        table.add_column("\nserver", overflow="fold")
        headers = ["\ncapacity", "times\nbaseline", "output\ntok/s", "\nreq/s", "in flight\ntokens", "KV pool\npeak"]
        headers += ["\nrun at"]
        for header in headers:
            table.add_column(header, justify="right", no_wrap=True)
        for key, answer in zip(self.keys, self.answers, strict=True):
            best, fallback = answer.first.best, answer.first.fallback
            if best is None:
                table.add_row(key, "none", *[NOTHING] * (len(headers) - 1))
                continue
            numbers, ratio = best.numbers, self._ratio(answer)
            table.add_row(
                key,
                best.load.label,
                NOTHING if ratio is None else digits(ratio),
                digits(numbers["output_throughput"]),
                digits(numbers["request_throughput"]),
                whole(numbers["mean_active_tokens"]),
                share_of_pool(round(numbers["peak_kv_tokens"]), answer.first.ceilings.kv_tokens),
                NOTHING if fallback is None else fallback.load.label,
            )
        return table

    def _ratio(self, answer: CapacityAnswer) -> float | None:
        """A server's capacity over the first one's."""
        before, after = self.answers[0].first.best, answer.first.best
        return None if before is None or after is None else after.value / before.value

    def _show_trust(self) -> None:
        """What is assumed, and what leaves the measured range, of each server."""
        said: dict[str, list[str]] = {}
        for key, server, answer in zip(self.keys, self.servers, self.answers, strict=True):
            sentences = [f"assumed: {text}" for text in server.assumed] + list(server.notes)
            for sentence in sentences + [f"outside the measured range: {note}" for note in answer.notes()]:
                said.setdefault(sentence, []).append(key)
        screen = console()
        screen.print()
        for sentence, keys in said.items():
            screen.print(f"Note on {', '.join(keys)}: {sentence}", markup=False)
