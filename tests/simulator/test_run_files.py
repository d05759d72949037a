"""A saved run comes back as it was, and nothing else is taken for one."""

from __future__ import annotations

import json
import math
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from simulator.loads.trace import HashIds, Trace
from simulator.loads.workload import ClosedLoop, Length, OpenLoop, Shape, Workload
from simulator.results.run import (
    GAP_COLUMNS,
    REQUEST_COLUMNS,
    SCHEMA_VERSION,
    TIMELINE_COLUMNS,
    TOKEN_COLUMNS,
    Level,
    Run,
)
from simulator.results.run_files import (
    RunFileError,
    append_level,
    load_run,
    save_run,
    start_run,
    workload_from_json,
    workload_to_json,
)

CLOSED = Workload(ClosedLoop(2), (Shape(Length.fixed(64), Length.fixed(8)),), 3)
MIXED = Workload(
    OpenLoop(math.inf, 0.7), (Shape(Length(10, 20), Length(1, 5), 0.3), Shape(Length.fixed(4000), Length(7, 9))), 5, 42
)


def table(columns: dict[str, str], *rows: tuple[object, ...]) -> pd.DataFrame:
    return pd.DataFrame(list(rows), columns=list(columns)).astype(columns)


def level(workload: Workload = CLOSED, tokens: bool = True) -> Level:
    awkward = 0.1 + 0.2  # 0.30000000000000004
    requests = table(
        REQUEST_COLUMNS,
        (0, 0.0, 64, 8, 1 / 3, awkward, math.pi, math.nan, -1, "length", ""),
        (1, 1e-9, 64, 0, math.nan, math.nan, math.nan, math.nan, -1, "", "http 500"),
        (2, 5.0, 64, 8, 5e-324, 999999999999.9999, 2.0, 0.25, 0, "length", "NA"),
    )
    gaps = table(GAP_COLUMNS, (1.5, 0.016, 7), (1.6, awkward, 1))
    timeline = table(TIMELINE_COLUMNS, (0.5, 2, 0, math.nan, 131.0))
    raw = table(TOKEN_COLUMNS, (0, 1 / 3, 1), (0, 2.0, 8)) if tokens else None
    return Level(
        workload, 2.5, requests, gaps, timeline, raw, ["one sentence, with a comma", "zwei Sätze"], {"ttft": 0.1}
    )


def run() -> Run:
    server: dict[str, object] = {"model": "demo", "kv_tokens": 86_896, "flags": ["--max-num-seqs", "128"]}
    return Run("measured", [level(), level(MIXED, tokens=False)], server, "2026-01-02T03:04:05+00:00")


def files(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


def edit(path: Path, old: str, new: str) -> None:
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new, 1))


def test_a_saved_run_loads_bit_for_bit(tmp_path: Path) -> None:
    save_run(run(), tmp_path / "run")
    loaded = load_run(tmp_path / "run")
    assert (loaded.source, loaded.server, loaded.started_at) == (run().source, run().server, run().started_at)
    assert len(loaded.levels) == 2
    for before, after in zip(run().levels, loaded.levels, strict=True):
        for name in ("workload", "duration", "notes", "server_means"):
            assert getattr(before, name) == getattr(after, name)
        for name in ("requests", "gaps", "timeline", "tokens"):
            if getattr(before, name) is None:
                assert getattr(after, name) is None
            else:
                pd.testing.assert_frame_equal(getattr(before, name), getattr(after, name), check_exact=True)


def test_random_times_lose_no_bit(tmp_path: Path) -> None:
    rng = np.random.default_rng(5)
    gaps = pd.DataFrame({"time": np.cumsum(rng.exponential(1e-3, 2000)), "gap": rng.exponential(1e-7, 2000)})
    gaps["count"] = 1
    measured = level()
    measured.gaps = gaps
    save_run(Run("measured", [measured]), tmp_path / "run")
    loaded = load_run(tmp_path / "run").levels[0].gaps
    assert np.array_equal(loaded[["time", "gap"]].to_numpy(), gaps[["time", "gap"]].to_numpy())


def test_the_same_run_gives_the_same_bytes(tmp_path: Path) -> None:
    save_run(run(), tmp_path / "a")
    save_run(load_run(tmp_path / "a"), tmp_path / "b")
    assert files(tmp_path / "a") == files(tmp_path / "b")


def test_empty_tables_keep_their_columns_and_types(tmp_path: Path) -> None:
    empty = Level(CLOSED, 0.0, table(REQUEST_COLUMNS), table(GAP_COLUMNS), table(TIMELINE_COLUMNS))
    save_run(Run("simulated", [empty]), tmp_path / "run")
    loaded = load_run(tmp_path / "run").levels[0]
    assert {name: str(kind) for name, kind in loaded.requests.dtypes.items()} == REQUEST_COLUMNS
    assert len(loaded.completed) == 0


def test_a_level_without_its_level_json_does_not_exist(tmp_path: Path) -> None:
    start_run(tmp_path, "measured", {}, "")
    append_level(tmp_path, level())
    append_level(tmp_path, level(MIXED))
    (tmp_path / "levels/001/level.json").unlink()
    assert [found.workload for found in load_run(tmp_path).levels] == [CLOSED]
    append_level(tmp_path, level())  # takes the place of what was left
    assert [found.workload for found in load_run(tmp_path).levels] == [CLOSED, CLOSED]


def test_a_writer_killed_at_any_moment_leaves_whole_levels(tmp_path: Path) -> None:
    writer = (
        "import sys; from simulator.results.run_files import *\n"
        "level = load_run(sys.argv[1]).levels[0]\n"
        "print('ready', flush=True)\n"
        "while True: append_level(sys.argv[2], level)\n"
    )
    save_run(Run("measured", [level()]), tmp_path / "one")
    start_run(tmp_path / "many", "measured", {}, "")
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    process = subprocess.Popen(
        [sys.executable, "-c", writer, str(tmp_path / "one"), str(tmp_path / "many")],
        stdout=subprocess.PIPE,
        env=environment,
    )
    assert process.stdout is not None
    process.stdout.readline()
    while not (tmp_path / "many/levels/004").exists():  # in the middle of its fifth level, or a little later
        time.sleep(0.001)
    process.send_signal(signal.SIGKILL)
    process.wait()
    process.stdout.close()
    levels = load_run(tmp_path / "many").levels
    assert len(levels) > 3
    assert all(len(found.requests) == 3 for found in levels)


def test_overwriting_replaces_a_run_and_nothing_else(tmp_path: Path) -> None:
    save_run(run(), tmp_path / "run")
    with pytest.raises(RunFileError, match="not empty"):
        save_run(run(), tmp_path / "run")
    save_run(Run("simulated", [level()]), tmp_path / "run", overwrite=True)
    assert load_run(tmp_path / "run").source == "simulated"
    assert [path.name for path in tmp_path.iterdir()] == ["run"]

    (tmp_path / "thesis").mkdir()
    (tmp_path / "thesis" / "chapter.tex").write_text("precious")
    with pytest.raises(RunFileError, match=r"something else.*chapter\.tex"):
        save_run(run(), tmp_path / "thesis", overwrite=True)
    assert (tmp_path / "thesis" / "chapter.tex").read_text() == "precious"


def test_a_run_that_cannot_be_saved_leaves_the_earlier_one(tmp_path: Path) -> None:
    save_run(run(), tmp_path / "run")
    before = files(tmp_path / "run")
    with pytest.raises(RunFileError, match="duration"):
        broken = level()
        broken.duration = math.nan
        save_run(Run("measured", [level(), broken]), tmp_path / "run", overwrite=True)
    assert files(tmp_path / "run") == before


@pytest.mark.parametrize(
    ("file", "old", "new", "message"),
    [
        (
            "run.json",
            f'"schema_version": {SCHEMA_VERSION}',
            f'"schema_version": {SCHEMA_VERSION + 1}',
            "upgrade capsim",
        ),
        ("run.json", '"schema_version": 1', '"version": 1', "no schema_version"),
        ("run.json", '"measured"', '"dreamt"', "source is 'dreamt'"),
        ("run.json", "{", "[", "not JSON"),
        ("levels/000/requests.csv", "ttft", "time_to_first", "column 'ttft' is missing"),
        ("levels/000/requests.csv", "5.0,64", "later,64", "line 4: arrival is 'later', not a number"),
        ("levels/000/requests.csv", "2,5.0,64", "2,5.0,6.5", "line 4: prompt_tokens is '6.5', not an integer"),
        ("levels/000/gaps.csv", "0.016,7", "0.016,", "line 2: count is '', not an integer"),
        ("levels/000/level.json", '"num_prompts": 3', '"num_prompts": NaN', "num_prompts must be an integer"),
        ("levels/000/level.json", '"concurrency": 2', '"concurrency": 0', "concurrency must be at least 1"),
        ("levels/000/level.json", '"seed"', '"sed"', "'seed' is missing"),
        ("levels/000/level.json", '"closed"', '"spiral"', "kind 'spiral'"),
        ("levels/000/level.json", '"duration": 2.5', '"duration": NaN', "duration must be a number"),
        ("levels/001/level.json", '"weight": 0.3', '"weight": -0.3', "weight must be positive"),
        ("levels/001/level.json", '"burstiness": 0.7', '"burstiness": NaN', "burstiness must be a number"),
    ],
)
def test_a_damaged_run_is_refused_by_name(tmp_path: Path, file: str, old: str, new: str, message: str) -> None:
    save_run(run(), tmp_path / "run")
    edit(tmp_path / "run" / file, old, new)
    with pytest.raises(RunFileError, match=message) as caught:
        load_run(tmp_path / "run")
    assert file in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_folder_that_is_no_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RunFileError, match="no such folder"):
        load_run(tmp_path / "nowhere")
    with pytest.raises(RunFileError, match=r"no run\.json"):
        load_run(tmp_path)
    (tmp_path / "levels").mkdir()
    (tmp_path / "run.json").write_text(json.dumps(["not", "a", "run"]))
    with pytest.raises(RunFileError, match="object was expected"):
        load_run(tmp_path)


def test_a_table_with_a_missing_file_is_refused(tmp_path: Path) -> None:
    save_run(run(), tmp_path / "run")
    (tmp_path / "run/levels/000/gaps.csv").unlink()
    with pytest.raises(RunFileError, match=r"gaps\.csv: no such file"):
        load_run(tmp_path / "run")


def test_columns_of_other_tools_are_left_out(tmp_path: Path) -> None:
    save_run(run(), tmp_path / "run")
    path = tmp_path / "run/levels/000/gaps.csv"
    path.write_text("".join(f"{line},x\n" for line in path.read_text().splitlines()))
    assert list(load_run(tmp_path / "run").levels[0].gaps.columns) == list(GAP_COLUMNS)


@pytest.mark.parametrize("workload", [CLOSED, MIXED, Workload(OpenLoop(2.5, math.inf), MIXED.shapes, 9, 1)])
def test_a_workload_survives_strict_json(workload: Workload) -> None:
    text = json.dumps(workload_to_json(workload), allow_nan=False)
    assert workload_from_json(json.loads(text)) == workload


@pytest.mark.parametrize(
    "file", ["run.json", "levels/000/level.json", "levels/000/requests.csv", "levels/000/gaps.csv"]
)
@pytest.mark.parametrize(
    "content",
    [b"", b"\0", b"\xff\xfe{", "größe".encode("latin-1"), b"null", b"[" * 100_000, b'{"a":' * 100_000,
     b'{"x": ' + b"9" * 5000],
)  # fmt: skip
def test_a_file_of_something_else_is_refused_in_a_line(tmp_path: Path, file: str, content: bytes) -> None:
    save_run(run(), tmp_path / "run")
    (tmp_path / "run" / file).write_bytes(content)
    with pytest.raises(RunFileError) as caught:
        load_run(tmp_path / "run")
    assert file in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("encoding", ["utf-16", "utf-8-sig"])
def test_another_encoding_is_no_run(tmp_path: Path, encoding: str) -> None:
    save_run(run(), tmp_path / "run")
    path = tmp_path / "run/levels/000/level.json"
    path.write_text(path.read_text(), encoding=encoding)
    with pytest.raises(RunFileError, match=r"level\.json: not JSON"):
        load_run(tmp_path / "run")


@pytest.mark.parametrize(("file", "told"), [("run.json", "16 MiB"), ("levels/000/gaps.csv", "4 GiB")])
def test_ten_gigabytes_are_not_read(tmp_path: Path, file: str, told: str) -> None:
    save_run(run(), tmp_path / "run")
    with (tmp_path / "run" / file).open("wb") as output:
        output.truncate(10 << 30)
    with pytest.raises(RunFileError, match=f"larger than {told}"):
        load_run(tmp_path / "run")


@pytest.mark.parametrize(
    "number", ["inf", "-inf", "1e308", "-1e308", "1e400", "9" * 40, "1e13", "0x10", "\u0661x", "1 0"]
)
def test_a_number_that_means_nothing_is_told_with_its_line(tmp_path: Path, number: str) -> None:
    save_run(run(), tmp_path / "run")
    for old, name in (("0.016", "gap"), (",7", "count")):
        path = tmp_path / "run/levels/000/gaps.csv"
        content = path.read_text()
        path.write_text(content.replace(old, f"{',' * (',' in old)}{number}", 1))
        with pytest.raises(RunFileError, match=f"line 2: {name} is '"):
            load_run(tmp_path / "run")
        path.write_text(content)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ('"num_prompts": 3', '"num_prompts": 1' + "0" * 12),
        ('"seed": 0', '"seed": -1'),
        ('"concurrency": 2', '"concurrency": 1' + "0" * 40),
        ('"weight": 1.0', '"weight": 1' + "0" * 400),
        ('"notes": [', '"notes": {"a": ['),
        ('"server_means": {', '"server_means": [{'),
        ('"duration": 2.5', '"duration": 1e999'),
        ('"duration": 2.5', '"duration": 1' + "0" * 400),
        ('"ttft": 0.1', '"ttft": 1' + "0" * 400),
        ('"duration": 2.5', '"intervals": {"p50_ttft": [1, "x"]}, "duration": 2.5'),
        ('"duration": 2.5', '"intervals": [], "duration": 2.5'),
        ('"workload": {', '"workload": [{'),
    ],
)
def test_a_level_that_claims_nonsense_is_refused(tmp_path: Path, old: str, new: str) -> None:
    save_run(run(), tmp_path / "run")
    edit(tmp_path / "run/levels/000/level.json", old, new)
    with pytest.raises(RunFileError, match=r"level\.json: (?!.*(could not convert|unpack|object|indices))"):
        load_run(tmp_path / "run")


@pytest.mark.parametrize("cell", ["nan", "-1", "1e308", "", "x", "9" * 40, "10000001", "1.5"])
@pytest.mark.parametrize("column", ["time", "prompt_tokens", "hash_ids"])
def test_recorded_requests_that_mean_nothing_are_refused(tmp_path: Path, column: str, cell: str) -> None:
    tokens = np.array([40, 50])
    ids = HashIds(np.array([1, 2, 3]), np.array([1, 3]), 16)
    trace = Trace("t", np.array([0.0, 1.0]), tokens, tokens, ids)
    saved = level()
    saved.workload = trace
    save_run(Run("simulated", [saved]), tmp_path / "run")
    path = tmp_path / "run/levels/000/load.csv"
    table = pd.read_csv(path, dtype=str)
    table.loc[1, column] = cell
    table.to_csv(path, index=False)
    if (column, cell) in (("time", "1.5"), ("time", "10000001"), ("hash_ids", ""), ("hash_ids", "10000001")):
        assert load_run(tmp_path / "run").levels[0].workload.num_prompts == 2
    else:
        with pytest.raises(RunFileError, match=r"level\.json: (?!.*(could not convert|invalid literal))"):
            load_run(tmp_path / "run")


@pytest.mark.parametrize("lines", [[1], [1, 2], [2]])
def test_cells_beyond_the_first_lines_never_shift_a_column(tmp_path: Path, lines: list[int]) -> None:
    """pandas would take the first cells of such a line for names of rows."""
    save_run(run(), tmp_path / "run")
    path = tmp_path / "run/levels/000/gaps.csv"
    rows = path.read_text().splitlines()
    path.write_text("".join(f"{row}{',9' * (number in lines)}\n" for number, row in enumerate(rows)))
    with pytest.raises(RunFileError, match=r"more cells than|Expected 3 fields in line 3, saw 4"):
        load_run(tmp_path / "run")
    path.write_text(f"{rows[0]}\n{rows[1]}{',1' * 20_000}\n")
    with pytest.raises(RunFileError, match=r"more cells than"):
        load_run(tmp_path / "run")


@pytest.mark.parametrize(
    "header", [b"time,gap,count,gap", b"time,gap,count" + b",1" * 30_000, b"time,gap,count," + b"x" * 10**6]
)
def test_a_first_line_that_names_no_columns_is_refused_at_once(tmp_path: Path, header: bytes) -> None:
    save_run(run(), tmp_path / "run")
    path = tmp_path / "run/levels/000/gaps.csv"
    path.write_bytes(path.read_bytes().replace(b"time,gap,count", header))
    with pytest.raises(RunFileError, match=r"gaps\.csv: the first line must name the columns"):
        load_run(tmp_path / "run")
