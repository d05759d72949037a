"""GPUs are read from NVML or a DCGM exporter; where there is neither, a reason comes instead."""

from __future__ import annotations

import http.server
import socket
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace

import pytest

from calibration.gpu import GpuReading, gpus_in, is_this_machine, read_dcgm, read_gpus, read_nvml

GIB, MIB = 1 << 30, 1 << 20
DCGM = """\
# HELP DCGM_FI_DEV_GPU_UTIL GPU utilization (in %).
# TYPE DCGM_FI_DEV_GPU_UTIL gauge
DCGM_FI_DEV_GPU_UTIL{gpu="1",UUID="GPU-b",device="nvidia1",modelName="NVIDIA H100 80GB HBM3",Hostname="n"} 0
DCGM_FI_DEV_GPU_UTIL{gpu="0",UUID="GPU-a",device="nvidia0",modelName="NVIDIA H100 80GB HBM3",Hostname="n"} 87
# HELP DCGM_FI_DEV_FB_FREE Framebuffer memory free (in MiB).
# TYPE DCGM_FI_DEV_FB_FREE gauge
DCGM_FI_DEV_FB_FREE{gpu="0",UUID="GPU-a",device="nvidia0",modelName="NVIDIA H100 80GB HBM3",Hostname="n"} 7531
DCGM_FI_DEV_FB_FREE{gpu="1",UUID="GPU-b",device="nvidia1",modelName="NVIDIA H100 80GB HBM3",Hostname="n"} 81000
# HELP DCGM_FI_DEV_FB_USED Framebuffer memory used (in MiB).
# TYPE DCGM_FI_DEV_FB_USED gauge
DCGM_FI_DEV_FB_USED{gpu="0",UUID="GPU-a",device="nvidia0",modelName="NVIDIA H100 80GB HBM3",Hostname="n"} 73469
DCGM_FI_DEV_FB_USED{gpu="1",UUID="GPU-b",device="nvidia1",modelName="NVIDIA H100 80GB HBM3",Hostname="n"} 0
"""


class NVMLError(Exception):
    pass


class FakeNvml:
    """NVML with two GPUs; the second cannot tell its memory."""

    NVMLError = NVMLError
    name: object = "NVIDIA H200"
    driver, shut_down = True, False

    def nvmlInit(self) -> None:  # noqa: N802
        if not self.driver:
            raise NVMLError("NVML Shared Library Not Found")

    def nvmlShutdown(self) -> None:  # noqa: N802
        self.shut_down = True

    def nvmlDeviceGetCount(self) -> int:  # noqa: N802
        return 2

    def nvmlDeviceGetHandleByIndex(self, index: int) -> int:  # noqa: N802
        return index

    def nvmlDeviceGetName(self, handle: int) -> object:  # noqa: N802
        return self.name

    def nvmlDeviceGetMemoryInfo(self, handle: int) -> SimpleNamespace:  # noqa: N802
        if handle == 1:
            raise NVMLError("Not Supported")
        return SimpleNamespace(total=140 * GIB, used=3 * GIB, free=137 * GIB)

    def nvmlDeviceGetUtilizationRates(self, handle: int) -> SimpleNamespace:  # noqa: N802
        return SimpleNamespace(gpu=42, memory=7)


@pytest.fixture
def nvml(monkeypatch: pytest.MonkeyPatch) -> FakeNvml:
    fake = FakeNvml()
    monkeypatch.setitem(sys.modules, "pynvml", fake)
    return fake


@pytest.fixture
def no_nvml(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", None)


@contextmanager
def exporter(text: str, status: int = 200) -> Iterator[str]:
    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(status)
            self.end_headers()
            self.wfile.write(text.encode())

        def log_message(self, *_: object) -> None:
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}/metrics"
        server.shutdown()


def closed_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def test_nvml_tells_name_memory_and_utilisation(nvml: FakeNvml) -> None:
    gpus = read_nvml().gpus
    assert gpus is not None
    assert (gpus[0].name, gpus[0].memory_total, gpus[0].memory_used) == ("NVIDIA H200", 140 * GIB, 3 * GIB)
    assert gpus[0].utilization == pytest.approx(0.42)
    assert (gpus[1].name, gpus[1].memory_total) == ("NVIDIA H200", None)
    assert nvml.shut_down


def test_old_nvml_gives_names_as_bytes(nvml: FakeNvml) -> None:
    nvml.name = b"Tesla T4"
    gpus = read_nvml().gpus
    assert gpus is not None
    assert gpus[0].name == "Tesla T4"


def test_a_machine_without_driver_or_library_gives_a_reason(nvml: FakeNvml, monkeypatch: pytest.MonkeyPatch) -> None:
    nvml.driver = False
    assert read_nvml() == GpuReading(None, "no NVIDIA driver (NVML Shared Library Not Found)")
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert read_nvml() == GpuReading(None, "the package nvidia-ml-py is not installed")


def test_a_dcgm_exporter_is_read() -> None:
    with exporter(DCGM) as url:
        reading = read_dcgm(url)
    assert reading.gpus is not None
    busy, idle = reading.gpus
    assert (busy.index, busy.name, busy.memory_total) == (0, "NVIDIA H100 80GB HBM3", 81000 * MIB)
    assert (busy.memory_used, busy.utilization) == (73469 * MIB, 0.87)
    assert (idle.memory_used, idle.utilization) == (0, 0.0)
    assert reading.kind is not None
    assert reading.kind.name == "NVIDIA H100 80GB HBM3"


def test_different_gpus_are_of_no_kind() -> None:
    with exporter(DCGM.replace('nvidia1",modelName="NVIDIA H100 80GB HBM3', 'nvidia1",modelName="NVIDIA L4')) as url:
        assert read_dcgm(url).kind is None
    assert GpuReading(None).kind is None


@pytest.mark.parametrize(
    ("text", "status", "reason"),
    [
        ("go_goroutines 3\n", 200, "shows no GPU"),
        ("<html> {", 200, "shows no metrics"),
        ("", 503, "answers HTTP 503"),
    ],
)
def test_another_server_gives_a_reason(text: str, status: int, reason: str) -> None:
    with exporter(text, status) as url:
        assert read_dcgm(url) == GpuReading(None, f"{url} {reason}")


def test_an_address_without_server_gives_a_reason() -> None:
    url = f"http://127.0.0.1:{closed_port()}/metrics"
    assert read_dcgm(url) == GpuReading(None, f"{url} cannot be reached")
    assert read_dcgm("no address").reason == "no address cannot be reached"


def test_a_silent_exporter_gives_a_reason() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        reading = read_dcgm(f"http://127.0.0.1:{silent.getsockname()[1]}/metrics", timeout=0.2)
    assert reading.reason.endswith("does not answer in time")


@pytest.mark.parametrize(
    ("host", "here"), [("localhost", True), ("127.0.0.1", True), ("::1", True), ("gpu-box", False), ("10.0.0.7", False)]
)
def test_nvml_is_asked_only_on_the_servers_machine(host: str, here: bool) -> None:
    assert is_this_machine(host) is here


def test_a_local_server_needs_no_exporter(nvml: FakeNvml) -> None:
    assert read_gpus("http://localhost:8000").gpus is not None


def test_a_named_exporter_wins(nvml: FakeNvml) -> None:
    with exporter(DCGM) as url:
        gpus = read_gpus("http://localhost:8000", dcgm_url=url).gpus
    assert gpus is not None
    assert gpus[0].name == "NVIDIA H100 80GB HBM3"


@pytest.mark.usefixtures("no_nvml")
def test_without_either_both_reasons_are_given() -> None:
    url = f"http://127.0.0.1:{closed_port()}/metrics"
    reading = read_gpus("http://127.0.0.1:8000", dcgm_url=url)
    assert reading.gpus is None
    assert reading.reason == f"NVML: the package nvidia-ml-py is not installed; DCGM: {url} cannot be reached"


def test_what_an_exporter_cannot_tell_is_not_told() -> None:
    """DCGM writes NaN where a GPU has no counter; it is no full load."""
    title = "H\x1b[31m100\n" + "x" * 200
    rows = [("GPU_UTIL", "NaN"), ("FB_USED", "1e300"), ("FB_FREE", "-5"), ("FB_TOTAL", "1e17")]
    labels = 'gpu="' + "9" * 5000 + '",modelName="' + title.replace("\n", "\\n") + '"'
    gpus = gpus_in("\n".join(f"DCGM_FI_DEV_{name}{{{labels}}} {value}" for name, value in rows), "http://x").gpus
    assert gpus is not None
    (gpu,) = gpus
    assert (gpu.index, gpu.memory_total, gpu.memory_used, gpu.utilization) == (-1, None, None, None)
    assert gpu.name is not None
    assert gpu.name.isprintable()
