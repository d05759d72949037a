"""Loads as JSON values; the requests of a recorded load stand in a table of their own.

load.csv    time (s), prompt_tokens, output_tokens, hash_ids (with spaces between); only of a `Trace`
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Container, Mapping
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
import pandas as pd

from simulator.loads.arrivals import Arrivals, RateCurve
from simulator.loads.lengths import Distribution, Histogram
from simulator.loads.sessions import Sessions, Talk
from simulator.loads.trace import HashIds, Trace
from simulator.loads.workload import ClosedLoop, Length, Load, OpenLoop, Shape, ThinkTime, Workload

TABLE = "load.csv"
MOST_BYTES = 4 << 30  # of a table
MOST_HEADER = 1 << 16  # bytes of its first line
MOST_IDS = 1 << 38  # that of a block of KV, beside its place, is kept in 63 bits

NUMBERS = {np.int64: "whole numbers", np.float64: "numbers"}
Number = TypeVar("Number", np.int64, np.float64)


class RunFileError(ValueError):
    """A folder or file that is not a run, or not one that this version reads. The message is one line."""


# --- writing


def workload_to_json(load: Load) -> dict[str, object]:
    """A load as plain JSON values, but for a recorded one's requests. Infinity, which JSON lacks, is the text "inf"."""
    if isinstance(load, Workload):
        shapes = [
            {"input_len": _length_json(s.input_len), "output_len": _length_json(s.output_len), "weight": s.weight}
            for s in load.shapes
        ]
        content: dict[str, object] = {"arrivals": _arrivals_json(load.arrivals), "shapes": shapes}
        return content | {"num_prompts": load.num_prompts, "seed": load.seed}
    if isinstance(load, Sessions):
        content = {"kind": "sessions", "arrivals": _arrivals_json(load.arrivals), "talk": _talk_json(load.talk)}
        content |= {"num_sessions": load.num_sessions, "seed": load.seed}
        return content | ({"think_time": _think_json(load.think_time)} if load.think_time else {})
    if isinstance(load, Trace):
        content = {"kind": "trace", "name": load.name, "num_prompts": load.num_prompts, "seed": load.seed}
        content |= {"arrivals": _arrivals_json(load.arrivals)} if load.arrivals else {}
        content |= {"max_concurrency": load.max_concurrency} if load.max_concurrency else {}
        return content | ({"hash_block_size": load.hash_ids.block_size} if load.hash_ids else {})
    raise RunFileError(f"workload: a {type(load).__name__} cannot be saved")


def write_recorded(load: Load, folder: Path) -> None:
    """Write the requests of a recorded load to `folder`; other loads are told by their JSON values alone."""
    if not isinstance(load, Trace):
        return
    columns: dict[str, object] = {} if load.times is None else {"time": load.times}
    columns |= {"prompt_tokens": load.prompt_tokens, "output_tokens": load.generated_tokens}
    if load.hash_ids is not None:
        columns["hash_ids"] = [" ".join(map(str, load.hash_ids.of(row).tolist())) for row in range(load.num_prompts)]
    pd.DataFrame(columns).to_csv(folder / TABLE, index=False, lineterminator="\n", encoding="utf-8")


def _arrivals_json(arrivals: Arrivals) -> dict[str, object]:
    content: dict[str, object] = {"kind": arrivals.kind}
    if isinstance(arrivals, ClosedLoop):
        content["concurrency"] = arrivals.concurrency
        return content | ({"think_time": _think_json(arrivals.think_time)} if arrivals.think_time else {})
    content["request_rate"] = _finite_or_inf("request_rate", arrivals.request_rate)
    content["burstiness"] = _finite_or_inf("burstiness", arrivals.burstiness)
    if arrivals.curve is not None:
        curve = arrivals.curve
        content["curve"] = {
            "text": curve.text,
            "seconds": list(curve.seconds),
            "factors": list(curve.factors),
            "period": curve.period,
        }
    return content | ({"max_concurrency": arrivals.max_concurrency} if arrivals.max_concurrency else {})


def _think_json(think_time: ThinkTime) -> dict[str, object]:
    return {"kind": think_time.kind, "mean": think_time.mean}


def _talk_json(talk: Talk) -> dict[str, object]:
    lengths = {name: _length_json(getattr(talk, name)) for name in ("turns", "user", "output")}
    return lengths | {"system": talk.system, "max_context": talk.max_context}


def _length_json(length: Length) -> object:
    bounds = [length.low, length.high]
    if isinstance(length.shape, Distribution):
        return {"bounds": bounds, "kind": length.shape.kind, "mean": length.shape.mean, "std": length.shape.std}
    if isinstance(length.shape, Histogram):
        return {"bounds": bounds, "kind": "histogram", "ranges": [list(part) for part in length.shape.ranges]}
    return bounds


def _finite_or_inf(name: str, value: float) -> float | str:
    if math.isnan(value):
        raise RunFileError(f"workload: {name} is NaN")
    return "inf" if math.isinf(value) else value


# --- reading


def workload_from_json(data: Any) -> Workload:
    """The workload that `workload_to_json` wrote. Raises `RunFileError` naming what is wrong."""
    load = load_from_json(data)
    if not isinstance(load, Workload):
        raise RunFileError(f"workload: a load of kind {data.get('kind')!r} can only be read with its run")
    return load


def load_from_json(data: Any, folder: Path | None = None) -> Load:
    """The load that `workload_to_json` and `write_recorded` wrote. Raises `RunFileError` naming what is wrong."""
    try:
        match data.get("kind"):
            case None:
                return _workload(data)
            case "sessions":
                return _sessions(data)
            case "trace" if folder is not None:
                return _trace(data, folder / TABLE)
            case kind:
                raise RunFileError(f"workload: a load of kind {kind!r} is not known here")
    except KeyError as error:
        raise RunFileError(f"workload: {error.args[0]!r} is missing") from None
    except (TypeError, AttributeError, OverflowError):
        raise RunFileError("workload: not in the form in which capsim writes a load") from None
    except RunFileError:
        raise
    except ValueError as error:
        raise RunFileError(f"workload: {error}") from None


def _workload(data: Mapping[str, Any]) -> Workload:
    shapes = tuple(
        Shape(_length(shape, "input_len"), _length(shape, "output_len"), real(shape, "weight"))
        for shape in data["shapes"]
    )
    return Workload(_arrivals(data["arrivals"]), shapes, integer(data, "num_prompts"), _seed(data))


def _sessions(data: Mapping[str, Any]) -> Sessions:
    words = data["talk"]
    turns, user, output = (_length(words, name) for name in ("turns", "user", "output"))
    context = None if words.get("max_context") is None else integer(words, "max_context")
    talk = Talk(turns, user, output, integer(words, "system"), context)
    think_time = _think(data["think_time"]) if "think_time" in data else None
    return Sessions(_arrivals(data["arrivals"]), talk, integer(data, "num_sessions"), think_time, _seed(data))


def _trace(data: Mapping[str, Any], path: Path) -> Trace:
    table = read_texts(path, ("time", "prompt_tokens", "output_tokens", "hash_ids"))
    prompts, outputs = (_column(table, name, np.int64) for name in ("prompt_tokens", "output_tokens"))
    return Trace(
        text(data, "name"),
        _column(table, "time", np.float64) if "time" in table.columns else None,
        prompts,
        outputs,
        _hash_ids(data, table) if "hash_block_size" in data else None,
        _arrivals(data["arrivals"]) if "arrivals" in data else None,
        _seed(data),
        integer(data, "max_concurrency") if "max_concurrency" in data else None,
    )


def _column(table: pd.DataFrame, name: str, kind: type[Number]) -> npt.NDArray[Number]:
    """Numbers from a column of texts."""
    if name not in table.columns:
        raise RunFileError(f"{TABLE}: column {name!r} is missing")
    try:
        return table[name].to_numpy(object).astype(kind)
    except (ValueError, OverflowError):
        raise RunFileError(f"{TABLE}: the column {name} must hold {NUMBERS[kind]}") from None


def _hash_ids(data: Mapping[str, Any], table: pd.DataFrame) -> HashIds:
    if "hash_ids" not in table.columns:
        raise RunFileError(f"{TABLE}: column 'hash_ids' is missing")
    parts = [cell.split() for cell in table["hash_ids"]]
    block_size = integer(data, "hash_block_size")
    try:
        ids = np.array([int(number) for part in parts for number in part], dtype=np.int64)
    except (ValueError, OverflowError):
        raise RunFileError(f"{TABLE}: hash_ids must be whole numbers with spaces between") from None
    if block_size < 1 or (len(ids) and not 0 <= ids.min() <= ids.max() < MOST_IDS):
        raise RunFileError(f"{TABLE}: hash_ids must be 0 to {MOST_IDS:,}, of blocks of at least one token")
    return HashIds(ids, np.cumsum([len(part) for part in parts]), block_size)


def _arrivals(data: Mapping[str, Any]) -> Arrivals:
    kind = data["kind"]
    if kind == "closed":
        think_time = _think(data["think_time"]) if "think_time" in data else None
        return ClosedLoop(integer(data, "concurrency"), think_time=think_time)
    if kind != "open":
        raise RunFileError(f"workload: arrivals of kind {kind!r} are not known, only 'closed' and 'open'")
    return OpenLoop(
        real(data, "request_rate"),
        real(data, "burstiness"),
        curve=_curve(data["curve"]) if "curve" in data else None,
        max_concurrency=integer(data, "max_concurrency") if "max_concurrency" in data else None,
    )


def _think(data: Mapping[str, Any]) -> ThinkTime:
    if data["kind"] not in ("fixed", "exponential"):
        raise RunFileError(f"workload: a think time of kind {data['kind']!r} is not known")
    return ThinkTime(real(data, "mean"), data["kind"])


def _curve(data: Mapping[str, Any]) -> RateCurve:
    period = None if data["period"] is None else real(data, "period")
    return RateCurve(tuple(data["seconds"]), tuple(data["factors"]), period, text(data, "text"))


def _length(data: Mapping[str, Any], name: str) -> Length:
    value = data[name]
    if isinstance(value, dict):
        bounds = _pair(value["bounds"], name)
        if value["kind"] == "histogram":
            return Length(*bounds, Histogram(tuple(_range(part, name) for part in value["ranges"])))
        return Length(*bounds, Distribution(value["kind"], real(value, "mean"), real(value, "std")))
    return Length(*_pair(value, name))


def _range(part: object, name: str) -> tuple[int, int, float]:
    if not isinstance(part, list) or len(part) != 3:
        raise RunFileError(f"{name} must have ranges of low, high and weight, got {part!r}")
    return (*_pair(part[:2], name), real({"weight": part[2]}, "weight"))


def _pair(value: object, name: str) -> tuple[int, int]:
    if not isinstance(value, list) or len(value) != 2 or not all(type(bound) is int for bound in value):
        raise RunFileError(f"{name} must be a pair of integers, got {value!r}")
    return value[0], value[1]


def read_texts(path: Path, columns: Container[str]) -> pd.DataFrame:
    """Those of the `columns` that a table of comma-separated values has, every cell as text. Raises `RunFileError`."""
    try:
        if path.stat().st_size > MOST_BYTES:
            raise RunFileError(f"{path}: larger than {MOST_BYTES >> 30} GiB; such a table is not read")
        _check_header(path)
        # pandas' own conversion of floats is not exact in every version
        with warnings.catch_warnings():
            warnings.simplefilter("error", pd.errors.ParserWarning)  # else cells beyond the header's are dropped
            table = pd.read_csv(path, dtype=str, keep_default_na=False, encoding="utf-8", index_col=False)
        return table[[name for name in table.columns if name in columns]]
    except FileNotFoundError:
        raise RunFileError(f"{path}: no such file") from None
    except UnicodeDecodeError:
        raise RunFileError(f"{path}: not a text file in UTF-8") from None
    except pd.errors.ParserWarning:
        raise RunFileError(f"{path}: a line has more cells than the first one, which names them") from None
    except (ValueError, OverflowError) as error:  # pandas' own among them
        raise RunFileError(f"{path}: not a table of comma-separated values: {str(error).strip()}") from None


def _check_header(path: Path) -> None:
    """Refuses what pandas would spend hours on to tell columns of the same name apart."""
    with path.open("rb") as file:
        header = file.readline(MOST_HEADER)
    names = header.strip().split(b",")
    if len(header) == MOST_HEADER or len(set(names)) < len(names):
        raise RunFileError(f"{path}: the first line must name the columns, each by another name")


def real(data: Mapping[str, Any], name: str) -> float:
    """A number, or infinity written "inf". Raises `RunFileError`."""
    value = data[name]
    if value == "inf":
        return math.inf
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise RunFileError(f"{name} must be a number, got {value!r}")
    try:
        number = float(value)
    except OverflowError:
        raise RunFileError(f"{name} is too large a number") from None
    if math.isnan(number):
        raise RunFileError(f"{name} must be a number, got {value!r}")
    return number


def text(data: Mapping[str, Any], name: str) -> str:
    """Raises `RunFileError` for anything else."""
    value = data[name]
    if not isinstance(value, str):
        raise RunFileError(f"{name} must be text, got {value!r}")
    return value


def _seed(data: Mapping[str, Any]) -> int:
    seed = integer(data, "seed")
    if seed < 0:
        raise RunFileError(f"seed must be at least 0, got {seed}")
    return seed


def integer(data: Mapping[str, Any], name: str) -> int:
    """A whole number. Raises `RunFileError`."""
    value = data[name]
    if isinstance(value, bool) or not isinstance(value, int):
        raise RunFileError(f"{name} must be an integer, got {value!r}")
    return value
