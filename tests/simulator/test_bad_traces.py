"""Traces that are broken, hostile or nonsense are refused in one line that names theirs."""

from __future__ import annotations

import bz2
import gzip
import json
import lzma
import os
from pathlib import Path

import pytest

from simulator.loads import trace_files
from simulator.loads.trace import TraceError
from simulator.loads.trace_files import read_trace

HEADER = "timestamp,input_length,output_length\n"
SAVED = "arrival,prompt_tokens,output_tokens,error\n"
LINE = {"timestamp": 0, "input_length": 40, "output_length": 5, "hash_ids": [1, 2, 3]}


def refused(path: Path) -> str:
    with pytest.raises(TraceError) as caught:
        read_trace(path)
    said = str(caught.value)
    assert said.isprintable()
    assert len(said) < 700
    return said


@pytest.mark.parametrize(
    ("content", "what"),
    [
        (b"\0" * 1000, "has the columns"),
        ((HEADER + "0,10,5\n").encode("utf-16"), "not a text file in UTF-8"),
        ("timestamp,input_length,output_length,Größe\n".encode("latin-1"), "not a text file in UTF-8"),
        (b"\x89PNG\r\n\x1a\n\xff\xfe", "not a text file in UTF-8"),
        (b"\x1b[31mred,\x07\n1,2\n" + b"x" * 100_000, "has the columns '\\x1b[31mred', '\\x07'"),
        (HEADER.encode() + b"0,1e308,5\n", "line 2: input_length is '1e308', not a whole number of tokens up to"),
        (HEADER.encode() + b"0,10,5\n1,1000000000000,5\n", "line 3: input_length is '1000000000000', not"),
        (HEADER.encode() + b"0,10,inf\n", "output_length is 'inf', not a whole number"),
        (HEADER.encode() + b"0,10,nan\n", "output_length is 'nan', not a whole number"),
        (HEADER.encode() + b"0,-10,5\n", "input_length is '-10', not a whole number"),
        (HEADER.encode() + b"1e308,10,5\n-1e308,10,5\n", "line 2: timestamp is '1e308', not a number up to 1e+11"),
        (HEADER.encode() + b"nan,10,5\n", "timestamp is 'nan', not a number"),
        (HEADER.encode() + b"9" * 5000 + b",10,5\n", "timestamp is '9999"),
        (HEADER.encode() + b"0,10\n", "line 2: has 2 fields, and the first line 3; is the file whole?"),
        (HEADER.encode() + b"0,10,5,7\n", "line 2: has 4 fields, and the first line 3"),
        (HEADER.encode() + b'0,10,"5\n\n\n', "line 4: not CSV (unexpected end of data)"),
        (SAVED.encode() + b"0,10,5,\n0.5,10,5\n", "line 3: has 3 fields, and the first line 4"),
        (b"timestamp,input_length,output_length,input_length\n0,1,2,3\n", "has the column input_length twice"),
        (b"TIMESTAMP,ContextTokens,GeneratedTokens\n0001-01-01,1,1\n", "not a date and time since 1970"),
        (b"TIMESTAMP,ContextTokens,GeneratedTokens\n99999-01-01,1,1\n", "not a date and time"),
    ],
)
def test_a_bad_csv_file_is_refused(tmp_path: Path, content: bytes, what: str) -> None:
    path = tmp_path / "t.csv"
    path.write_bytes(content)
    assert what in refused(path)


@pytest.mark.parametrize(
    ("line", "what"),
    [
        (LINE | {"input_length": 10**12}, "input_length is 1000000000000, not a whole number of tokens up to"),
        (LINE | {"input_length": 10**40}, "input_length is 1000000"),
        (LINE | {"input_length": -1}, "input_length is -1, not"),
        (LINE | {"timestamp": 1e308}, "timestamp is 1e+308, not a number up to 1e+14"),
        (LINE | {"timestamp": 10**400}, "timestamp is 1000"),
        (LINE | {"timestamp": float("nan")}, "timestamp is nan, not"),
        (LINE | {"timestamp": [[]] * 1000}, "timestamp is a list, not"),
        (LINE | {"timestamp": 1e13}, "as the format timed; is it another?"),
        (LINE | {"hash_ids": [10**12]}, "hash_ids must be"),
        ('{"timestamp": ' + "9" * 5000 + "}", "line 2: holds a number with thousands of digits"),
        ('{"timestamp": 0, "timestamp": 1}', "line 2: has 'timestamp' twice; which one is meant?"),
        ('{"a": ' * 100_000, "line 2: nested too deeply"),
        ('{"prompt": "\0"}', "line 2: not JSON"),
    ],
)
def test_a_bad_line_of_json_is_refused(tmp_path: Path, line: object, what: str) -> None:
    path = tmp_path / "t.jsonl"
    second = line if isinstance(line, str) else json.dumps(line)
    path.write_text(f"{json.dumps(LINE)}\n{second}\n")
    assert what in refused(path)


def test_a_comma_too_many_in_every_row_moves_no_column(tmp_path: Path) -> None:
    """Read by pandas as it comes, the first column becomes an index, and times are taken for lengths."""
    path = tmp_path / "t.csv"
    path.write_text(HEADER + "0,10,5,\n\n3,20,6,\n")
    trace = read_trace(path)
    assert trace.times is not None
    assert (trace.times.tolist(), trace.prompt_tokens.tolist(), trace.generated_tokens.tolist()) == (
        [0, 3], [10, 20], [5, 6],
    )  # fmt: skip


def test_a_byte_order_mark_quotes_and_windows_line_ends_change_nothing(tmp_path: Path) -> None:
    path = tmp_path / "t.csv"
    path.write_bytes(b'\xef\xbb\xbf"timestamp", input_length ,output_length,note\r\n0,10,5,"a, ""b"""\r\n1,20,6,\r\n')
    assert read_trace(path).prompt_tokens.tolist() == [10, 20]


@pytest.mark.parametrize(("ending", "pack"), [("gz", gzip.compress), ("bz2", bz2.compress), ("xz", lzma.compress)])
def test_a_damaged_archive_is_refused(tmp_path: Path, ending: str, pack) -> None:
    packed = pack((HEADER + "".join(f"{number},10,5\n" for number in range(5000))).encode())
    path = tmp_path / f"t.csv.{ending}"
    for damaged in (packed[:-20], packed[:60] + b"\xff\0\xff" + packed[63:], b"nothing of the kind", b"\0" * 100):
        path.write_bytes(damaged)
        assert "damaged" in refused(path)
    path.write_bytes(packed)
    assert read_trace(path).num_prompts == 5000


def test_a_line_without_end_in_a_small_archive_is_refused(tmp_path: Path) -> None:
    """100 MB in 100 kB."""
    path = tmp_path / "t.csv.gz"
    with gzip.open(path, "wb", compresslevel=1) as file:
        file.write(HEADER.encode() + b"0,10,5\n")
        for _ in range(100):
            file.write(b"1" * 1_000_000)
    assert "line 3: longer than 16 MiB; such a line is not read" in refused(path)


def test_a_quote_that_never_ends_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trace_files, "LONGEST_LINE", 1000)
    path = tmp_path / "t.csv"
    path.write_text(HEADER + '0,10,"5\n' + "1,10,5\n" * 1000)
    assert "not CSV (field larger than field limit (1000))" in refused(path)


def test_more_lines_than_the_memory_holds_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trace_files, "MOST_LINES", 100)
    path = tmp_path / "t.csv"
    path.write_text(HEADER + "0,10,5\n" * 99)
    assert read_trace(path).num_prompts == 99
    path.write_text(HEADER + "0,10,5\n" * 100)
    assert "has more than 100 lines; give a part of it" in refused(path)


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="no pipes with names here")
def test_a_pipe_is_refused(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    assert "no ordinary file" in refused(tmp_path / "pipe")
