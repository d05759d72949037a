"""Start a real vLLM on this machine's CPU, and stop it again without leaving anything behind.

    with paced_server(venv, "--max-num-seqs", "128", log_dir=tmp_path) as server:
        print(server.url)  # http://127.0.0.1:PORT, the model is "demo"

`paced_server` has no model: its step times follow a formula (paced_executor.py), so it judges accuracy sharply.
`model_server` computes a small random-weight model: all of vLLM, with the noise of the machine. Both are on loopback.

From a shell, until Ctrl-C:  python tests/live/server.py {paced,model} VENV [vllm flags ...]
"""

import argparse
import contextlib
import ctypes
import http.client
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).resolve().parent
HOST = "127.0.0.1"
MODEL_NAME = "demo"
PACED_KV_BYTES_PER_TOKEN = 57_344
PACED_START_S = 180.0  # longest wait for a server; usual are 15 s, and 90 s for a model that is compiled the first time
MODEL_START_S = 600.0
STOP_S = 20.0  # longest wait for a server to end by itself
PR_SET_PDEATHSIG = 1  # from linux/prctl.h
LIBC = ctypes.CDLL(None)


@dataclass(frozen=True)
class Server:
    """A running server.

    `model` is the folder that it serves (its tokenizer is in `tokenizer`); `steps_log` the truth about every step of a
    paced server, columns as in paced_executor.StepLog, and None for a real model.
    """

    url: str
    port: int
    process: subprocess.Popen[bytes]
    log_path: Path
    steps_log: Path | None
    model: Path

    @property
    def tokenizer(self) -> Path:
        """Folder of the tokenizer, for clients that make text prompts."""
        return self.model / "tokenizer"

    def get(self, path: str, timeout: float = 10.0) -> str:
        """Return the body of a GET; raise ConnectionError unless the status is 200."""
        connection = http.client.HTTPConnection(HOST, self.port, timeout=timeout)  # knows no proxy, unlike urllib
        with contextlib.closing(connection):
            connection.request("GET", path)
            response = connection.getresponse()
            if response.status != 200:
                raise ConnectionError(f"GET {path}: status {response.status}")
            return response.read().decode()


@contextlib.contextmanager
def paced_server(
    venv: Path,
    *flags: str,
    step: Mapping[str, float] | None = None,
    asynchronous: bool = True,
    kv_tokens: int | None = None,
    log_dir: Path,
) -> Iterator[Server]:
    """Run a vLLM whose steps take the time of a formula.

    `flags` are flags of `vllm serve` and win over the ones given here; `step` replaces coefficients of
    paced_executor.StepFormula; `kv_tokens` is the size of the KV pool (default: 86,896 tokens), a multiple of the block
    size 16. The logs go to the folder `log_dir`.
    """
    steps_log = log_dir / f"steps-{time.monotonic_ns()}.csv"
    environment = {
        "PYTHONPATH": os.pathsep.join(filter(None, (str(HERE), os.environ.get("PYTHONPATH")))),
        "CAPSIM_PACED_STEP": json.dumps(dict(step or {})),
        "CAPSIM_PACED_ASYNC": "1" if asynchronous else "0",
        "CAPSIM_PACED_LOG": str(steps_log),
        "CAPSIM_PACED_KV_BYTES_PER_TOKEN": str(PACED_KV_BYTES_PER_TOKEN),
    }
    paced = ["--block-size", "16", "--distributed-executor-backend", "paced_executor.PacedExecutor"]
    if kv_tokens is not None:
        paced += ["--kv-cache-memory-bytes", str(kv_tokens * PACED_KV_BYTES_PER_TOKEN)]
    model = model_folder(venv, "tiny")
    with _serve(venv, model, (*paced, *flags), environment, log_dir, steps_log, PACED_START_S) as server:
        yield server


@contextlib.contextmanager
def model_server(
    venv: Path, *flags: str, preset: str = "mid", kv_tokens: int | None = None, log_dir: Path
) -> Iterator[Server]:
    """Run a vLLM that computes a small model with random weights on the CPU.

    `preset` is one of make_model.py; `kv_tokens` the size of the KV pool, a multiple of the CPU's block size 128.
    """
    model = model_folder(venv, preset)
    pool = []
    if kv_tokens is not None:
        pool = ["--kv-cache-memory-bytes", str(kv_tokens * _kv_bytes_per_token(model))]
    with _serve(venv, model, (*pool, *flags), {}, log_dir, None, MODEL_START_S) as server:
        yield server


@contextlib.contextmanager
def ahead_of_others() -> Iterator[bool]:
    """Let this thread, and whatever it starts, run before ordinary processes; gives whether the system permits it.

    On few cores the work of others would show in token gaps. Needs root or CAP_SYS_NICE.
    """
    policy, parameters = os.sched_getscheduler(0), os.sched_getparam(0)
    try:
        os.sched_setscheduler(0, os.SCHED_RR, os.sched_param(1))
    except PermissionError:
        yield False
        return
    try:
        yield True
    finally:
        os.sched_setscheduler(0, policy, parameters)


def installed(venv: Path) -> bool:
    """Whether install_vllm.sh has finished in `venv`."""
    return (venv / ".capsim-vllm").is_file() and (venv / "bin" / "vllm").exists()


def model_folder(venv: Path, preset: str) -> Path:
    """Return the model of this preset, kept inside `venv` and made when it is not there yet."""
    folder = venv / "capsim-models" / preset
    if not (folder / "tokenizer" / "tokenizer_config.json").exists():  # the file that is written last
        subprocess.run([venv / "bin" / "python", HERE / "make_model.py", folder, "--preset", preset], check=True)
    return folder


def _kv_bytes_per_token(model: Path) -> int:
    """Return the KV cache of one token in bfloat16, bytes."""
    config: dict[str, int] = json.loads((model / "config.json").read_text())
    head_size = config["hidden_size"] // config["num_attention_heads"]
    return config["num_hidden_layers"] * config["num_key_value_heads"] * head_size * 2 * 2


@contextlib.contextmanager
def _serve(
    venv: Path,
    model: Path,
    flags: tuple[str, ...],
    environment: Mapping[str, str],
    log_dir: Path,
    steps_log: Path | None,
    start_s: float,
) -> Iterator[Server]:
    """Run `vllm serve` until the end of the block."""
    port = _free_port()
    log_path = log_dir / f"vllm-{port}.log"
    own = [f"--tokenizer={model / 'tokenizer'}", "--load-format=dummy", "--max-model-len=8192"]
    own += [f"--served-model-name={MODEL_NAME}", f"--host={HOST}", f"--port={port}"]
    offline = {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1"}
    with log_path.open("wb") as log:
        process = subprocess.Popen(
            [venv / "bin" / "vllm", "serve", model, *own, *flags],
            env={**os.environ, **offline, **environment},
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,  # a group of its own, so that the engine process can be stopped with it
            preexec_fn=_die_with_parent,
        )
    try:
        server = Server(f"http://{HOST}:{port}", port, process, log_path, steps_log, model)
        _wait_until_healthy(server, start_s)
        yield server
    finally:
        _stop(process)


def _free_port() -> int:
    """Return a port that nobody listens on now."""
    with socket.socket() as listener:
        listener.bind((HOST, 0))
        return int(listener.getsockname()[1])


def _die_with_parent() -> None:
    """Ask the kernel to end this process when the thread that started it ends, even by a signal without `finally`."""
    LIBC.prctl(PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)


def _wait_until_healthy(server: Server, start_s: float) -> None:
    """Return when the server answers; raise RuntimeError with the end of its log when it has died or takes too long."""
    deadline = time.monotonic() + start_s
    while time.monotonic() < deadline:
        if server.process.poll() is not None:
            raise RuntimeError(f"vllm serve ended with {server.process.returncode}\n{_tail(server.log_path)}")
        with contextlib.suppress(OSError, http.client.HTTPException):
            server.get("/health")
            return
        time.sleep(0.2)
    raise RuntimeError(f"vllm serve was not ready after {start_s:.0f} s\n{_tail(server.log_path)}")


def _tail(log_path: Path, lines: int = 40) -> str:
    """Return the last lines of a log, after its name."""
    text = log_path.read_text(errors="replace").splitlines()[-lines:]
    return "\n".join((f"the end of {log_path}:", *text))


def _stop(process: subprocess.Popen[bytes]) -> None:
    """End the server and every process that it started."""
    process.terminate()
    try:
        process.wait(STOP_S)
    except subprocess.TimeoutExpired:
        pass
    finally:  # also when a second Ctrl-C interrupts the wait
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def main() -> None:
    """Serve until Ctrl-C or SIGTERM."""
    parser = argparse.ArgumentParser(description="Serve on loopback until Ctrl-C; further flags go to vllm serve.")
    parser.add_argument("kind", choices=("paced", "model"))
    parser.add_argument("venv", type=Path)
    arguments, flags = parser.parse_known_args()
    start = paced_server if arguments.kind == "paced" else model_server
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    log_dir = Path(tempfile.mkdtemp(prefix="capsim-vllm-"))
    with contextlib.suppress(KeyboardInterrupt), start(arguments.venv.absolute(), *flags, log_dir=log_dir) as server:
        print(server.url, "tokenizer", server.tokenizer, "log", server.log_path, "steps", server.steps_log, flush=True)
        sys.exit(server.process.wait())


if __name__ == "__main__":
    main()
