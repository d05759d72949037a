"""Loads as JSON values; the requests of a recorded load stand in a table of their own.

load.csv    time (s), prompt_tokens, output_tokens, hash_ids (with spaces between); only of a `Trace`
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from simulator.loads.arrivals import Arrivals, RateCurve
from simulator.loads.lengths import Distribution, Histogram
from simulator.loads.sessions import Sessions, Talk
from simulator.loads.trace import HashIds, Trace
from simulator.loads.workload import ClosedLoop, Length, Load, OpenLoop, Shape, ThinkTime, Workload

TABLE = "load.csv"


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
    except (TypeError, AttributeError) as error:
        raise RunFileError(f"workload: not the expected form ({error})") from None
    except RunFileError:
        raise
    except ValueError as error:
        raise RunFileError(f"workload: {error}") from None


def _workload(data: Mapping[str, Any]) -> Workload:
    shapes = tuple(
        Shape(_length(shape, "input_len"), _length(shape, "output_len"), real(shape, "weight"))
        for shape in data["shapes"]
    )
    return Workload(_arrivals(data["arrivals"]), shapes, integer(data, "num_prompts"), integer(data, "seed"))


def _sessions(data: Mapping[str, Any]) -> Sessions:
    words = data["talk"]
    turns, user, output = (_length(words, name) for name in ("turns", "user", "output"))
    context = None if words.get("max_context") is None else integer(words, "max_context")
    talk = Talk(turns, user, output, integer(words, "system"), context)
    think_time = _think(data["think_time"]) if "think_time" in data else None
    return Sessions(_arrivals(data["arrivals"]), talk, integer(data, "num_sessions"), think_time, integer(data, "seed"))


def _trace(data: Mapping[str, Any], path: Path) -> Trace:
    try:
        table = pd.read_csv(path, dtype=str, keep_default_na=False, encoding="utf-8")
    except FileNotFoundError:
        raise RunFileError(f"{path.name}: no such file, it holds the recorded requests") from None
    hash_ids = None
    if "hash_block_size" in data:
        parts = [text.split() for text in table["hash_ids"]]
        ids = np.array([number for part in parts for number in part], dtype=np.int64)
        ends = np.cumsum([len(part) for part in parts])
        hash_ids = HashIds(ids, ends, integer(data, "hash_block_size"))
    return Trace(
        data["name"],
        table["time"].to_numpy(object).astype(np.float64) if "time" in table.columns else None,
        table["prompt_tokens"].to_numpy(object).astype(np.int64),
        table["output_tokens"].to_numpy(object).astype(np.int64),
        hash_ids,
        _arrivals(data["arrivals"]) if "arrivals" in data else None,
        integer(data, "seed"),
        integer(data, "max_concurrency") if "max_concurrency" in data else None,
    )


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
    return RateCurve(tuple(data["seconds"]), tuple(data["factors"]), period, data["text"])


def _length(data: Mapping[str, Any], name: str) -> Length:
    value = data[name]
    if isinstance(value, dict):
        bounds = _pair(value["bounds"], name)
        if value["kind"] == "histogram":
            return Length(*bounds, Histogram(tuple((low, high, weight) for low, high, weight in value["ranges"])))
        return Length(*bounds, Distribution(value["kind"], real(value, "mean"), real(value, "std")))
    return Length(*_pair(value, name))


def _pair(value: object, name: str) -> tuple[int, int]:
    if not isinstance(value, list) or len(value) != 2 or not all(type(bound) is int for bound in value):
        raise RunFileError(f"{name} must be a pair of integers, got {value!r}")
    return value[0], value[1]


def real(data: Mapping[str, Any], name: str) -> float:
    """A number, or infinity written "inf". Raises `RunFileError`."""
    value = data[name]
    if value == "inf":
        return math.inf
    if isinstance(value, bool) or not isinstance(value, (int, float)) or math.isnan(value):
        raise RunFileError(f"{name} must be a number, got {value!r}")
    return float(value)


def integer(data: Mapping[str, Any], name: str) -> int:
    """A whole number. Raises `RunFileError`."""
    value = data[name]
    if isinstance(value, bool) or not isinstance(value, int):
        raise RunFileError(f"{name} must be an integer, got {value!r}")
    return value
