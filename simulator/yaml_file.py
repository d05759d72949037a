"""YAML files that people write: read with care, and every fault told in one line with its place and its remedy."""

from __future__ import annotations

import difflib
import re
import typing
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import yaml
from pydantic import BaseModel, ConfigDict, ValidationError
from pydantic_core import ErrorDetails

MAX_BYTES = 1 << 20
MOST_VALUES = 20_000  # keys and values of a file
MOST_TOLD = 24  # names that an error lists

Place = tuple[str | int, ...]  # the keys and list positions that lead to a value


class DocumentError(ValueError):
    """A file that cannot be used. The message is one line: file, line number, key and remedy."""


class KeyProblem(ValueError):
    """A fault of one entry of a mapping, raised by a validator of the whole mapping."""

    def __init__(self, key: str, message: str) -> None:
        super().__init__(f"{key}: {message}")
        self.key = key
        self.message = message


class Section(BaseModel):
    """A mapping of a file: no other keys, no conversions, no NaN, no later change."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, allow_inf_nan=False)


SectionType = TypeVar("SectionType", bound=Section)


def read_yaml(path: Path, section: type[SectionType], error: type[DocumentError]) -> SectionType:
    """The file at `path` as a `section`. Whatever is wrong with it raises `error`."""
    text = _read_text(path, error)
    try:
        data, lines = _parse(text)
    except yaml.MarkedYAMLError as problem:
        mark = problem.problem_mark or problem.context_mark
        line = f", line {mark.line + 1}" if mark else ""
        raise error(f"{path}{line}: not valid YAML: {problem.problem or problem.context}") from None
    except (yaml.YAMLError, RecursionError) as problem:
        reason = "nested too deep" if isinstance(problem, RecursionError) else " ".join(str(problem).split())
        raise error(f"{path}: not valid YAML: {reason}") from None
    try:
        return section.model_validate(data)
    except ValidationError as problem:
        faults = problem.errors(include_url=False)
        # a newer file has keys that are not known yet, and a misspelled one is both unknown and missing: tell the first
        fault = min(faults, key=lambda fault: (fault["loc"] != ("schema_version",), fault["type"] != "extra_forbidden"))
        place, message = _explain(fault, section)
        raise error(f"{path}, line {_line(place, lines)}: {message}") from None


def suggestion(name: str, known: Iterable[str]) -> str:
    """What to write instead of an unknown `name`."""
    known = sorted(known)
    close = difflib.get_close_matches(name, known, n=1, cutoff=0.6)
    if close:
        return f"did you mean {close[0]!r}?"
    more = f" and {len(known) - MOST_TOLD} more" if len(known) > MOST_TOLD else ""
    return f"known are {', '.join(known[:MOST_TOLD])}{more}"


def _read_text(path: Path, error: type[DocumentError]) -> str:
    try:
        with path.open("rb") as file:
            content = file.read(MAX_BYTES + 1)
    except FileNotFoundError:
        raise error(f"{path}: no such file") from None
    except OSError as problem:
        raise error(f"{path}: cannot be read ({problem.strerror})") from None
    if len(content) > MAX_BYTES:
        raise error(f"{path}: larger than {MAX_BYTES >> 20} MiB; such a file is not read")
    try:
        return content.decode("utf-8")
    except UnicodeDecodeError:
        raise error(f"{path}: not a text file in UTF-8") from None


class _Loader(yaml.SafeLoader):
    """Plain data only. An alias could blow a small file up to gigabytes, so anchors and aliases are refused."""

    values = 0  # so far, keys among them

    def compose_node(self, parent: yaml.Node | None, index: int) -> yaml.Node | None:
        self.values += 1
        event = self.peek_event()  # type: ignore[no-untyped-call]
        if isinstance(event, yaml.AliasEvent) or getattr(event, "anchor", None) is not None:
            raise yaml.composer.ComposerError(
                None, None, "anchors (&) and aliases (*) are not allowed; write the value out", event.start_mark
            )
        if self.values > MOST_VALUES:
            raise yaml.composer.ComposerError(
                None, None, f"more than {MOST_VALUES:,} keys and values; such a file is not read", event.start_mark
            )
        return super().compose_node(parent, index)


_Loader.yaml_implicit_resolvers = {}  # instead of YAML 1.1's:
# YAML 1.2's numbers (1e-5 is one, 1:30 and 0777 are not), and dates stay text.
_Loader.add_implicit_resolver("tag:yaml.org,2002:null", re.compile(r"^(?:~|null|)$"), ["~", "n", ""])
_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:bool", re.compile(r"^(?:true|True|false|False|yes|Yes|no|No|on|On|off|Off)$"), list("tTfFyYnNoO")
)
_Loader.add_implicit_resolver("tag:yaml.org,2002:int", re.compile(r"^[-+]?(?:0|[1-9][0-9_]*)$"), list("-+0123456789"))
_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(
        r"^(?:[-+]?(?:[0-9][0-9_]*\.[0-9]*|\.[0-9]+)(?:[eE][-+]?[0-9]+)?|[-+]?[0-9]+[eE][-+]?[0-9]+"
        r"|[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN))$"
    ),
    list("-+0123456789."),
)


def _parse(text: str) -> tuple[object, dict[Place, int]]:
    """Plain data, and the line of every value."""
    loader = _Loader(text)
    try:
        node = loader.get_single_node()
        if node is None:
            return {}, {}
        lines: dict[Place, int] = {(): node.start_mark.line + 1}
        return _plain(loader, node, (), lines), lines
    finally:
        loader.dispose()


_UNSOUND = re.compile("[\0\ud800-\udfff]")


def _plain(loader: _Loader, node: yaml.Node, place: Place, lines: dict[Place, int]) -> object:
    if isinstance(node, yaml.MappingNode) and node.tag == "tag:yaml.org,2002:map":
        return _mapping(loader, node, place, lines)
    if isinstance(node, yaml.SequenceNode) and node.tag == "tag:yaml.org,2002:seq":
        values = []
        for index, item in enumerate(node.value):
            lines[(*place, index)] = item.start_mark.line + 1
            values.append(_plain(loader, item, (*place, index), lines))
        return values
    try:
        value: object = loader.construct_object(node)
    except (ValueError, OverflowError):
        told = f"{_shown(node.value)} is no value that can be read"
        raise yaml.constructor.ConstructorError(None, None, told, node.start_mark) from None
    return _sound(value, node)


def _sound(value: object, node: yaml.Node) -> object:
    """The value, unless it is text with an escape such as ``\\0`` or ``\\ud800`` that no file or name can hold."""
    if isinstance(value, str) and _UNSOUND.search(value):
        told = f"{_shown(value)} has a character that no text can hold"
        raise yaml.constructor.ConstructorError(None, None, told, node.start_mark)
    return value


def _mapping(loader: _Loader, node: yaml.MappingNode, place: Place, lines: dict[Place, int]) -> dict[str, object]:
    values: dict[str, object] = {}
    for key_node, value_node in node.value:
        key = key_node.value if isinstance(key_node, yaml.ScalarNode) else None
        if not isinstance(key, str):
            raise yaml.constructor.ConstructorError(None, None, "a key must be plain text", key_node.start_mark)
        _sound(key, key_node)
        if key in values:
            raise yaml.constructor.ConstructorError(None, None, f"{key!r} is given twice", key_node.start_mark)
        lines[(*place, key)] = key_node.start_mark.line + 1
        values[key] = _plain(loader, value_node, (*place, key), lines)
    return values


def _line(place: Place, lines: Mapping[Place, int]) -> int:
    """The line of a value, or of the closest thing around it that is in the file."""
    while place not in lines and place:
        place = place[:-1]
    return lines.get(place, 1)


def _explain(fault: ErrorDetails, section: type[Section]) -> tuple[Place, str]:
    """Where a fault is, and what it is in the words of whoever wrote the file."""
    place: Place = fault["loc"]
    name, value, context = _name(place), fault["input"], fault.get("ctx", {})
    match fault["type"]:
        case "extra_forbidden":
            owner = _section_at(section, place[:-1])
            return place, f"unknown key {name}; {suggestion(str(place[-1]), owner.model_fields if owner else ())}"
        case "missing":
            purpose = _purpose(section, place)
            return place, f"key {name} is missing{': it is ' if purpose else ''}{purpose}"
        case "value_error":
            return _explain_own(context["error"], place, value)
        case "literal_error":
            close = suggestion(str(value), re.findall(r"'([^']*)'", context["expected"]))
            return place, f"{name} must be {context['expected']}, got {_shown(value)}; {close}"
        case kind:
            wanted = _WANTED.get(kind, fault["msg"].removeprefix("Input should be "))
            purpose = _purpose(section, place)
            hint = f" ({purpose})" if purpose else ""
            return place, f"{name} must be {wanted}{hint}, got {_shown(value)}{_without_unit(purpose, value)}"


_WANTED = {
    "int_type": "a whole number",
    "int_from_float": "a whole number",
    "float_type": "a number",
    "finite_number": "a finite number",
    "string_type": "text in quotes",
    "string_pattern_mismatch": "text of another form",
    "bool_type": "true or false",
    "list_type": "a list in [ ]",
    "tuple_type": "a pair [low, high]",
    "model_type": "a group of keys",
    "dict_type": "a group of keys",
}


def _explain_own(problem: Exception, place: Place, value: object) -> tuple[Place, str]:
    """A fault that a validator of ours has found."""
    message = str(problem)
    if isinstance(problem, KeyProblem):
        place, message = (*place, problem.key), problem.message
    message = f"{_name(place)}: {message}"
    if isinstance(value, dict):  # the line of the first key that the message names
        plain = message.replace("-", "_")
        named = {plain.find(key.replace("-", "_")): key for key in value}
        named.pop(-1, None)
        place = (*place, named[min(named)]) if named else place
    return place, message.removeprefix(": ")


_SECONDS = {"s": 1.0, "sec": 1.0, "seconds": 1.0, "ms": 1e-3, "us": 1e-6, "µs": 1e-6, "ns": 1e-9}


def _without_unit(purpose: str, value: object) -> str:
    """How to write a number that came with a unit."""
    found = re.fullmatch(r"\s*([0-9]+(?:\.[0-9]*)?)\s*([a-zA-Zµ/]+)\s*", value) if isinstance(value, str) else None
    if not found:
        return ""
    factor = {"seconds": 1.0, "milliseconds": 1e3}.get(purpose.partition(",")[0])
    if factor is not None and found[2] in _SECONDS:
        return f"; write {float(found[1]) * _SECONDS[found[2]] * factor:.6g}"
    return "; write the number without a unit"


def _purpose(section: type[Section], place: Place) -> str:
    """The description of the field at `place`, or of the mapping or list that holds it."""
    for around in (place, place[:-1]):
        owner = _section_at(section, around[:-1])
        if around and owner and (field := owner.model_fields.get(str(around[-1]))):
            return field.description or ""
    return ""


def _section_at(section: type[Section], place: Place) -> type[BaseModel] | None:
    """The section that describes the keys at `place`."""
    kind: Any = section
    for part in place:
        if _is_section(kind):
            field = kind.model_fields.get(part)
            kind = field.annotation if field else None
        else:
            kind = next(iter(typing.get_args(kind)[-1:]), None)  # what a mapping or a list holds
        if type(None) in typing.get_args(kind):
            kind = typing.get_args(kind)[0]
    return kind if _is_section(kind) else None


def _is_section(kind: Any) -> bool:
    return isinstance(kind, type) and issubclass(kind, BaseModel)


def _name(place: Place) -> str:
    """A place as people write it: ``load.shapes[0]``."""
    text = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in place)
    return text.removeprefix(".") or "the file"


def _shown(value: object) -> str:
    text = repr(value) if not isinstance(value, (dict, list)) else f"a {'group' if isinstance(value, dict) else 'list'}"
    return text if len(text) <= 60 else f"{text[:57]}..."
