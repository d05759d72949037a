"""An API key is seen by its server alone: not in what is printed or kept, nor by who lists processes."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest
from leaky_server import LeakyServer, serve_leaky
from typer.main import get_command
from typer.testing import CliRunner

from calibration.endpoint import EndpointError, clean_url, discover
from calibration.gpu import read_dcgm
from calibration.secrecy import environment_without_secrets, keepable, shown_url, without_key
from capsim.cli import app
from capsim.measuring_options import ServerOptions

KEY = "sk-9f3b0a77c1de4f58a2b6-Very/Secret+Key=="
PART = KEY[:12]  # nor may a good part of it be seen
ROOT = Path(__file__).resolve().parents[2]
LOG = f"""\
(APIServer pid=1) INFO 01-01 10:00:00 [utils.py:1] non-default args: {{'model': 'demo', 'api_key': ['{KEY}'], \
'max_num_seqs': 32, 'hf_token': '{KEY}', 'additional_config': {{'password': '{KEY}'}}}}
(EngineCore pid=2) INFO 01-01 10:00:01 [core.py:1] Initializing a V1 LLM engine (v0.32.0) with config: model='demo', \
served_model_name={KEY}, max_seq_len=8192, device_config=cuda
"""


@dataclass(frozen=True)
class Told:
    """What a command printed, how it ended, and the arguments and environments of it and its children."""

    code: int
    output: bytes
    arguments: bytes
    environments: bytes  # of its children alone: its own is its user's


@pytest.fixture
def server() -> Iterator[LeakyServer]:
    with serve_leaky(KEY) as running:
        yield running


@pytest.fixture
def key_file(tmp_path: Path) -> Path:
    path = tmp_path / "key"
    path.write_text(f"{KEY}\n")
    path.chmod(0o600)
    return path


def capsim(arguments: Sequence[object], folder: Path, **environment: str) -> Told:
    """Run a command as a process of its own in `folder`, watching it by what any user of this machine can list."""
    folder.mkdir(exist_ok=True)
    known = {name: value for name, value in os.environ.items() if "KEY" not in name} | environment
    process = subprocess.Popen(
        [sys.executable, "-X", "dev", "-m", "capsim", *map(str, arguments)],
        cwd=folder,
        env=known | {"PYTHONPATH": str(ROOT), "PYTHONWARNINGS": "ignore"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    seen: dict[str, set[bytes]] = {"cmdline": set(), "environ": set()}
    ended = threading.Event()

    def watch() -> None:
        while not ended.wait(0.05):
            for number, is_child in _family(process.pid):
                for kind, found in seen.items():
                    if kind == "cmdline" or is_child:
                        found.add(_read(Path(f"/proc/{number}/{kind}")))

    watcher = threading.Thread(target=watch)
    watcher.start()
    output, _ = process.communicate(timeout=600)
    ended.set()
    watcher.join()
    return Told(process.returncode, output, b"\n".join(seen["cmdline"]), b"\n".join(seen["environ"]))


def _family(pid: int) -> Iterator[tuple[int, bool]]:
    yield pid, False
    for task in Path("/proc").glob("[0-9]*/stat"):
        fields = _read(task).rpartition(b")")[2].split()
        if len(fields) > 1 and int(fields[1]) == pid:
            yield int(task.parent.name), True


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError:
        return b""


def holds_no_key(told: Told, folder: Path, with_environment: bool = True) -> None:
    written = {str(path): path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    places = written | {"the output": told.output, "the arguments": told.arguments}
    places |= {"a child's environment": told.environments} if with_environment else {}
    assert [name for name, content in places.items() if PART.encode() in content] == []


needs_proc = pytest.mark.skipif(not Path("/proc/self/cmdline").exists(), reason="no /proc on this system")


@pytest.mark.slow
@needs_proc
def test_what_is_measured_and_made_of_it_holds_no_key(server: LeakyServer, key_file: Path, tmp_path: Path) -> None:
    work = tmp_path / "work"
    work.mkdir()
    (tmp_path / "vllm.log").write_text(LOG)
    asked = ("--endpoint", server.url, "--api-key-file", key_file, "--server-log", tmp_path / "vllm.log")
    load = ("--num-prompts", "12", "--input-len", "16", "--output-len", "8")
    told = []

    def does(*arguments: object) -> bytes:
        server.completions = 0
        told.append(capsim(arguments, work))
        assert told[-1].code == 0, told[-1].output.decode()
        return told[-1].output

    swept = does("sweep", *asked, "--concurrency", "1,2,4", *load, "--no-probes", "-o", "run", "--export", "b.json")
    assert b"of 12 requests failed" in swept
    assert b"***" in swept, "the server's words are there, without the key"
    does("calibrate", "--from", "run", "--hold-out", "0", "-o", "p.yaml", "--json")
    does("validate", *asked, "--profile", "p.yaml", "--concurrency", "2", *load, "-o", "again")
    does("report", "run", "--profile", "p.yaml", "-o", "report.html", "--format", "html,svg,png,csv,md")
    for one in told:
        holds_no_key(one, work)
    assert any(b"calibration.clients" in one.arguments for one in told), "the processes that send were looked at"
    assert (work / "report.md").exists()
    assert all(given == f"Bearer {KEY}" for _, given in server.seen), "and the server got it every time"


@pytest.mark.slow
@needs_proc
def test_a_key_of_the_environment_goes_to_no_child(server: LeakyServer, tmp_path: Path) -> None:
    load = ("--concurrency", "2", "--num-prompts", "4", "--input-len", "16", "--output-len", "8", "--no-probes")
    command = ("sweep", "--endpoint", server.url, *load, "-o", "run")
    told = capsim(command, tmp_path / "work", OPENAI_API_KEY=KEY, HF_TOKEN=f"hf_{KEY}")
    assert told.code == 0, told.output.decode()
    assert b"PYTHONPATH" in told.environments
    holds_no_key(told, tmp_path / "work")


@pytest.mark.slow
@needs_proc
@pytest.mark.parametrize("form", [(), ("--json",)], ids=str)
def test_a_check_up_shows_no_key(server: LeakyServer, key_file: Path, tmp_path: Path, form: tuple[str, ...]) -> None:
    told = capsim(("doctor", *form, "--endpoint", server.url, "--api-key-file", key_file), tmp_path / "work")
    assert b"***" in told.output
    holds_no_key(told, tmp_path / "work")


@pytest.mark.slow
@needs_proc
def test_a_list_of_models_shows_no_key(server: LeakyServer, key_file: Path, tmp_path: Path) -> None:
    asked = ("--endpoint", server.url, "--api-key-file", key_file, "--model", "other")
    told = capsim(("sweep", *asked, "--concurrency", "1", "-o", "run"), tmp_path / "work")
    assert b"does not serve 'other'; give --model one of: demo, ***" in told.output
    holds_no_key(told, tmp_path / "work")


@pytest.mark.slow
@needs_proc
def test_a_wrong_key_is_not_repeated_either(server: LeakyServer, key_file: Path, tmp_path: Path) -> None:
    key_file.write_text(f"wrong-{KEY}")
    told = capsim(("doctor", "--endpoint", server.url, "--api-key-file", key_file), tmp_path / "work")
    assert told.code == 1
    assert b"refuses the API key" in told.output
    holds_no_key(told, tmp_path / "work")


def test_a_redirection_is_not_followed_with_the_key(server: LeakyServer) -> None:
    with serve_leaky("another") as stranger:
        server.elsewhere = stranger.url
        assert not discover(server.url, api_key=KEY).has_metrics
        assert stranger.seen == []


# --- the command line


def test_no_option_takes_a_key_in_clear() -> None:
    group = get_command(app)
    options = {
        (name, flag): option
        for name, command in group.commands.items()  # type: ignore[attr-defined]
        for option in command.params
        for flag in option.opts
        if any(word in flag.lower() for word in ("key", "token-", "secret", "password", "auth", "header"))
    }
    files = {(name, flag) for name, flag in options if flag == "--api-key-file"}
    assert {name for name, _ in files} == {"calibrate", "doctor", "sweep", "validate"}
    assert {flag for _, flag in options.keys() - files} <= {"--long-prefill-token-threshold"}


def test_a_key_file_that_all_can_read_is_told(key_file: Path) -> None:
    quiet = CliRunner().invoke(app, ["doctor", "--endpoint", "localhost:1", "--api-key-file", str(key_file)])
    key_file.chmod(0o644)
    told = CliRunner().invoke(app, ["doctor", "--endpoint", "localhost:1", "--api-key-file", str(key_file)])
    assert "Note" not in quiet.stderr
    assert f"every user of this machine can read the key in {key_file}: chmod 600" in told.stderr
    assert PART not in told.output + told.stderr


def test_a_large_file_is_no_key(tmp_path: Path) -> None:
    (tmp_path / "key").write_bytes(b"x" * (1 << 20))
    told = CliRunner().invoke(app, ["doctor", "--endpoint", "localhost:1", "--api-key-file", str(tmp_path / "key")])
    assert told.exit_code == 2
    assert "holds no key: it is larger than 16384 bytes" in told.stderr


def test_what_holds_a_key_does_not_show_it() -> None:
    assert PART not in repr(ServerOptions("demo", KEY, False, {}))


# --- addresses and pasted lines


@pytest.mark.parametrize(
    "url",
    [
        "http://user:pa55word@host:8000",
        "https://host/v1?api_key=pa55word",
        "user:pa55word@host:8000",
        "ftp://pa55word@host",
        "http://host#pa55word",
        "//user:pa55word@host",
        "http://user:pa55word@[::1",
        "http://user:pa55/pa55word@host",
    ],
)
def test_passwords_in_addresses_are_refused_and_not_repeated(url: str) -> None:
    with pytest.raises(EndpointError) as caught:
        clean_url(url)
    assert "pa55" not in str(caught.value)
    assert "pa55" not in shown_url(url)
    told = CliRunner().invoke(app, ["doctor", "--endpoint", url])
    assert told.exit_code == 1
    assert "pa55" not in told.output + told.stderr


def test_an_exporters_password_is_not_shown() -> None:
    assert "http://127.0.0.1:9/metrics " in read_dcgm("http://me:pa55word@127.0.0.1:9/metrics?key=pa55word").reason
    assert "pa55" not in read_dcgm("http://me:pa55word@127.0.0.1:9/metrics?key=pa55word").reason


@pytest.mark.parametrize(
    "line",
    [
        f"vllm serve demo-7b --api-key {KEY} --max-num-seqs 16",
        f"VLLM_API_KEY={KEY} HF_TOKEN={KEY} vllm serve demo-7b --hf-token {KEY} --max-num-seqs 16",
        f"docker run -e HF_TOKEN={KEY} vllm/vllm-openai --model demo-7b --api-key={KEY} --max-num-seqs 16",
        f"curl --api-key {KEY} vllm serve demo-7b --max-num-seqs 16",
        f"vllm serve demo-7b --api-key '{KEY}",
        f"vllm serve demo-7b --api-key {KEY} --max-num-sequences 16",
        f"vllm serve demo-7b --otlp-traces-endpoint http://u:{KEY}@h --max-num-seqs 16",
        f"vllm serve demo-7b --ssl-keyfile {KEY} --max-num-seqs no",
    ],
)
@pytest.mark.parametrize("form", [(), ("--json",), ("--csv",)], ids=str)
def test_keys_in_pasted_lines_are_not_repeated(profile_file: Path, line: str, form: tuple[str, ...]) -> None:
    load = ("--concurrency", "1", "--num-prompts", "4", "--input-len", "64", "--output-len", "8", "--no-intervals")
    told = CliRunner().invoke(app, ["what-if", "--profile", str(profile_file), "--alt", line, *load, *form])
    assert told.exit_code in (0, 1, 2)
    assert not told.exception or isinstance(told.exception, SystemExit)
    assert PART not in told.output + told.stderr


# --- the words themselves


def test_a_key_is_hidden_whole_cut_and_often() -> None:
    assert without_key(f"a {KEY} b {KEY}", KEY) == "a *** b ***"
    assert without_key(f"the key was {KEY[:14]}...", KEY) == "the key was ***..."
    assert without_key("nothing of it", KEY) == "nothing of it"
    assert without_key("vllm", "vllm") == "vllm", "so short a key is a word, not a secret"
    assert keepable({KEY: [KEY, 1, None, {"a": KEY}]}, KEY) == {"***": ["***", 1, None, {"a": "***"}]}
    assert keepable("\ud800", None).encode()


def test_secrets_of_the_environment_are_known_by_their_names(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("OPENAI_API_KEY", "HF_TOKEN", "AWS_SECRET_ACCESS_KEY", "PGPASSWORD"):
        monkeypatch.setenv(name, KEY)
    assert KEY not in environment_without_secrets().values()
    assert "PATH" in environment_without_secrets()
