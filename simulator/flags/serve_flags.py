"""Every flag of ``vllm serve``: whether the model covers it, and how it is written. From ``vllm_flags.yaml``."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Literal

from simulator.engine.engine_flags import FlagError
from simulator.yaml_file import DocumentError, Section, read_yaml, suggestion

TABLE = Path(__file__).with_name("vllm_flags.yaml")

Kind = Literal["modelled", "not_modelled", "no_effect"]
Values = Literal["none", "one", "some", "maybe"]
_VALUES: dict[str, Values] = {"": "none", "N": "one", "N...": "some", "N?": "maybe"}


@dataclass(frozen=True)
class ServeFlag:
    """A flag by its first name, without dashes.

    Attributes
        kind: modelled, not modelled though it would change the result, or without effect on it
        topic: what it is about; empty for a modelled one
        values: how many follow it; a switch has none
        as_if_left_out: values with which it might as well be left out
        opposite_matters: whether a switch's ``--no-`` form changes the result as well
    """

    name: str
    kind: Kind
    topic: str
    values: Values
    as_if_left_out: tuple[str, ...] = ()
    opposite_matters: bool = False

    def refuses(self, value: str | bool) -> bool:
        """Whether with `value` it would change the result in a way that is not modelled."""
        if self.kind != "not_modelled":
            return False
        if isinstance(value, bool):
            return value or self.opposite_matters
        return value not in self.as_if_left_out


class FlagTable(Section):
    """The data file: flags by topic, each topic a text such as ``--tensor-parallel-size|-tp N --enable-lora``."""

    modelled: str
    not_modelled: dict[str, str]
    no_effect: dict[str, str]
    as_if_left_out: dict[str, list[str]]
    opposite_matters: list[str]


@lru_cache(maxsize=1)
def serve_flags() -> dict[str, ServeFlag]:
    """Every flag by each of its names as they are written, dashes included."""
    table = read_yaml(TABLE, FlagTable, DocumentError)
    known: dict[str, ServeFlag] = {}
    groups: list[tuple[Kind, str, str]] = [("modelled", "", table.modelled)]
    groups += [("not_modelled", topic, text) for topic, text in table.not_modelled.items()]
    groups += [("no_effect", topic, text) for topic, text in table.no_effect.items()]
    for kind, topic, text in groups:
        for names, values in _entries(text):
            name = names[0].lstrip("-")
            neutral = tuple(table.as_if_left_out.get(name, ()))
            flag = ServeFlag(name, kind, topic, values, neutral, name in table.opposite_matters)
            known |= dict.fromkeys(names, flag)
    return known


def find_flag(written: str) -> tuple[ServeFlag, bool]:
    """The flag that is written so, and False if it is a switch's ``--no-`` form.

    Underscores and dashes are the same, as for vLLM, and what follows a dot, as in ``--speculative-config.method``, is
    a part of the value. Raises `FlagError` for an unknown one; an abbreviation is unknown.
    """
    known = serve_flags()
    name = written.partition(".")[0]
    name = name.replace("_", "-") if name.startswith("--") else name
    if re.match(r"-O\S*$", name):  # -O3, which is not written with a space
        name = "--optimization-level"
    if name in known:
        return known[name], True
    positive = known.get(f"--{name.removeprefix('--no-')}")
    if name.startswith("--no-") and positive is not None and positive.values == "none":
        return positive, False
    matching = sorted(other for other in known if len(name) > 3 and other.startswith(name))
    if matching:
        raise FlagError(f"{written} is an abbreviation, which is not read; write {' or '.join(matching[:3])}")
    hint = suggestion(name, known)
    raise FlagError(f"vLLM has no flag {written}; {hint if hint.startswith('did') else 'see vllm serve --help=all'}")


def _entries(text: str) -> Iterator[tuple[list[str], Values]]:
    """Names of each flag of a topic, and how many values it takes."""
    for names, value in re.findall(r"(-[^\s]+)(?:\s+(N\S*))?", text):
        yield names.split("|"), _VALUES[value]
