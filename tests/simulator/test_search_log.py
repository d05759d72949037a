"""The file from which a search goes on holds results of simulations and nothing else."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from simulator.engine.fleet import Fleet
from simulator.loads.workload import ClosedLoop, Length, Shape, Workload
from simulator.planning.optimize import Play, play
from simulator.planning.search_log import SearchLog, SearchLogError
from simulator.profile import Profile


@pytest.fixture
def result(profile: Profile) -> dict[str, Any]:
    load = Workload(ClosedLoop(1), (Shape(Length.fixed(20), Length.fixed(3)),), 3)
    return play(Play(load, profile.engine_flags, profile.step_time, profile.host_time, Fleet()))


def test_results_come_back(result: dict[str, Any], tmp_path: Path) -> None:
    with SearchLog(tmp_path / "log") as log:
        log.add("a", result)
        log.add("b", {"refused": "too long"})
    with SearchLog(tmp_path / "log") as log:
        assert str(log.get("a")) == str(result)
        assert log.get("b") == {"refused": "too long"}


def without(name: str) -> Callable[[dict[str, Any]], dict[str, Any]]:
    return lambda result: {key: value for key, value in result.items() if key != name}


@pytest.mark.parametrize(
    "spoil",
    [
        *map(without, ("numbers", "figures", "growth", "peak")),
        lambda result: result | {"numbers": without("mean_itl")(result["numbers"])},
        lambda result: result | {"numbers": result["numbers"] | {"duration": 1e308}},
        lambda result: result | {"numbers": result["numbers"] | {"duration": float("inf")}},
        lambda result: result | {"numbers": result["numbers"] | {"duration": "1"}},
        lambda result: result | {"figures": list(result["figures"])},
        lambda result: result | {"peak": -1},
        lambda result: result | {"peak": 10**40},
        lambda result: result | {"growth": []},
        lambda result: [result],
        lambda result: None,
    ],
)
def test_a_result_that_lacks_something_is_refused_with_its_line(
    result: dict[str, Any], tmp_path: Path, spoil: Callable[[dict[str, Any]], object]
) -> None:
    lines = [json.dumps({"key": key, "result": one}) for key, one in (("a", result), ("b", spoil(result)))]
    (tmp_path / "log").write_text("\n".join(lines) + "\n")
    with pytest.raises(SearchLogError, match=r"log:2: not a result of a search"):
        SearchLog(tmp_path / "log")
    assert (tmp_path / "log").read_text() == "\n".join(lines) + "\n"


@pytest.mark.parametrize(
    "content",
    [b"\0\n", b"[]\n", b"null\n", b"[" * 100_000 + b"\n", b'{"key":' * 50_000 + b"\n", b"\xff\xfe\n", b"x" * (2 << 20),
     b'{"key": "a", "schema_version": ' + b"9" * 5000 + b"}\n", '{"key": "a"}\n'.encode("utf-16"),
     b"{" + b" " * (2 << 20)],
)  # fmt: skip
def test_a_file_of_something_else_is_neither_read_nor_written(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "log").write_bytes(content)
    with pytest.raises(SearchLogError, match="not a result of a search"):
        SearchLog(tmp_path / "log")
    assert (tmp_path / "log").read_bytes() == content


def test_ten_gigabytes_are_not_read(tmp_path: Path) -> None:
    with (tmp_path / "log").open("wb") as file:
        file.truncate(10 << 30)
    with pytest.raises(SearchLogError, match="not a result of a search"):
        SearchLog(tmp_path / "log")
