"""Files in YAML that are broken, hostile or absurd: one line that says so, at once, whatever they were to be."""

from __future__ import annotations

import re
import tracemalloc
from collections.abc import Callable
from pathlib import Path

import pytest

from simulator.profile import Profile
from simulator.scenario import Scenario
from simulator.yaml_file import MAX_BYTES, DocumentError
from tests.conftest import PROFILE

SCENARIO = """\
name: demo
profile: demo.yaml
load:
  concurrency: [1, 4]
  input_len: 512
  output_len: 64
  num_prompts: 50
"""
LAUGHS = "a: &a [x, x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"{name}: &{name} [{', '.join([f'*{before}'] * 10)}]\n" for before, name in zip("abcdefgh", "bcdefghi", strict=True)
)
KINDS = {"profile": (PROFILE, Profile.load), "scenario": (SCENARIO, Scenario.read)}

BROKEN = {
    "billion laughs": (lambda text: LAUGHS + text, "anchors .* are not allowed"),
    "merge key": (lambda text: "x: &x {a: 1}\n<<: *x\n" + text, "anchors .* are not allowed"),
    "python object": (
        lambda text: text + "x: !!python/object/apply:os.system ['true']\n",
        "could not determine a constr",
    ),
    "twice": (lambda text: text + text, "is given twice"),
    "nul": (lambda text: text.replace("demo", "de\0mo", 1), "special characters are not allowed"),
    "half a character": (lambda text: text.replace("demo", '"\\ud800"', 1), "character that no text can hold"),
    "half of a key": (lambda text: '"\\ud800": 1\n' + text, "character that no text can hold"),
    "escaped nul": (lambda text: text.replace("demo", '"de\\0mo"', 1), "character that no text can hold"),
    "deep": (lambda text: text + "x: " + "[" * 2_000, "nested too deep"),
    "deep maps": (lambda text: text + "x: " + "{a: " * 2_000, "nested too deep"),
    "no mapping": (lambda text: f"[{'1, ' * 3}1]", "a group of keys"),
    "key of a list": (lambda text: "? [a, b]\n: c\n" + text, "a key must be plain text"),
    "digits": (lambda text: text.replace("demo", "9" * 5000, 1), "is no value that can be read"),
    "cut off": (lambda text: text[: len(text) // 2] + "{", "not valid YAML"),
    "empty": (lambda text: "", "key name is missing"),
}
NUMBERS = (
    "NaN",
    ".nan",
    ".inf",
    "-1",
    "1e308",
    "-1e308",
    "1e400",
    "10GiB",
    "1" + "0" * 40,
    "'5'",
    "true",
    "2026-01-01",
)


@pytest.fixture(params=list(KINDS))
def kind(request: pytest.FixtureRequest) -> tuple[str, Callable[[Path], object]]:
    return KINDS[request.param]


def refused(read: Callable[[Path], object], path: Path) -> str:
    with pytest.raises(DocumentError) as caught:
        read(path)
    message = str(caught.value)
    assert "\n" not in message
    assert message.startswith(str(path))
    return message


@pytest.mark.parametrize(("breaks", "told"), BROKEN.values(), ids=BROKEN)
def test_a_broken_document_is_refused_in_one_line(
    kind: tuple[str, Callable[[Path], object]], tmp_path: Path, breaks: Callable[[str], str], told: str
) -> None:
    text, read = kind
    path = tmp_path / "document.yaml"
    assert read(_whole(path, text)) is not None
    path.write_text(breaks(text), encoding="utf-8")
    assert re.search(told, refused(read, path))


def _whole(path: Path, text: str) -> Path:
    """The document in order, so that it is the breaking that is refused."""
    path.with_name("whole.yaml").write_text(text)
    return path.with_name("whole.yaml")


@pytest.mark.parametrize("encoding", ["utf-16", "utf-32", "latin-1", "cp1252"])
def test_another_encoding_is_told(kind: tuple[str, Callable[[Path], object]], tmp_path: Path, encoding: str) -> None:
    text, read = kind
    path = tmp_path / "document.yaml"
    path.write_bytes(text.replace("demo", "größe", 1).encode(encoding))
    assert "not a text file in UTF-8" in refused(read, path)


def test_a_byte_order_mark_is_read_over(kind: tuple[str, Callable[[Path], object]], tmp_path: Path) -> None:
    text, read = kind
    path = tmp_path / "document.yaml"
    path.write_bytes(b"\xef\xbb\xbf" + text.encode())
    assert str(read(path)) == str(read(_whole(path, text)))


def test_ten_gigabytes_are_not_read(kind: tuple[str, Callable[[Path], object]], tmp_path: Path) -> None:
    path = tmp_path / "document.yaml"
    with path.open("wb") as file:
        file.truncate(10 << 30)  # takes no room on the disk
    tracemalloc.start()
    assert "larger than 1 MiB" in refused(kind[1], path)
    assert tracemalloc.get_traced_memory()[1] < 4 * MAX_BYTES
    tracemalloc.stop()


def test_a_folder_is_told(kind: tuple[str, Callable[[Path], object]], tmp_path: Path) -> None:
    assert "cannot be read (Is a directory)" in refused(kind[1], tmp_path)


@pytest.mark.parametrize("number", NUMBERS)
@pytest.mark.parametrize(
    ("text", "read", "old"),
    [
        (PROFILE, Profile.load, "value: 0.01,"),
        (PROFILE, Profile.load, "max_model_len: 8192"),
        (PROFILE, Profile.load, "output_throughput: -0.011,"),
        (PROFILE, Profile.load, "kv_bytes_per_token: 65536"),
        (PROFILE, Profile.load, "concurrency: [1, 8]"),
        (SCENARIO, Scenario.read, "input_len: 512"),
        (SCENARIO, Scenario.read, "num_prompts: 50"),
        (SCENARIO, Scenario.read, "concurrency: [1, 4]"),
    ],
)
def test_a_number_that_means_nothing_is_refused_where_it_stands(
    tmp_path: Path, text: str, read: Callable[[Path], object], old: str, number: str
) -> None:
    key, _, value = old.partition(": ")
    if (number, old) in MEANT:
        return
    path = tmp_path / "document.yaml"
    path.write_text(text.replace(old, f"{key}: {f'[1, {number}]' if '[' in value else number + ',' * (',' in value)}"))
    line = next(line for line, words in enumerate(text.splitlines(), 1) if old in words)
    assert f", line {line}: " in refused(read, path)


# what could be meant: a size in bytes, an error of -100 %, and texts that are lengths
MEANT = {("'5'", "max_model_len: 8192"), ("-1", "output_throughput: -0.011,"), ("'5'", "input_len: 512")}


def test_more_values_than_anyone_writes_are_not_read(tmp_path: Path) -> None:
    path = tmp_path / "document.yaml"
    path.write_text("x: [" + "1," * 20_000 + "1]\n")
    assert "more than 20,000 keys and values" in refused(Profile.load, path)


def test_every_line_of_alternatives_is_not_judged_after_the_first_fault(tmp_path: Path) -> None:
    path = tmp_path / "document.yaml"
    path.write_text(SCENARIO + "alternatives:\n" + "- --max-num-seqz 1\n" * 500)
    assert "alternatives[0]: vLLM has no flag --max-num-seqz" in refused(Scenario.read, path)
