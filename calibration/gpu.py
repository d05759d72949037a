"""The GPUs under a server: from NVML on this machine, or from NVIDIA's DCGM exporter. Neither is needed.

A reading never fails: where nothing is to be had it says why.
"""

from __future__ import annotations

import contextlib
import importlib
import ipaddress
import re
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

import aiohttp

from calibration.foreign_text import one_line
from calibration.metrics import Samples
from calibration.own_thread import answer_of
from calibration.secrecy import shown_url

DCGM_PORT = 9400
MIB = 1 << 20
MOST_MIB = 1 << 30  # of a GPU
MAX_BYTES = 1 << 24  # of an answer


@dataclass(frozen=True)
class Gpu:
    """One GPU. None is what is not told."""

    index: int
    name: str | None = None  # "NVIDIA H100 80GB HBM3"
    memory_total: int | None = None  # bytes
    memory_used: int | None = None  # bytes
    utilization: float | None = None  # 0 to 1, share of the last moments in which a kernel ran


@dataclass(frozen=True)
class GpuReading:
    """What was found: None with the `reason` where nothing was."""

    gpus: tuple[Gpu, ...] | None
    reason: str = ""

    @property
    def kind(self) -> Gpu | None:
        """A GPU like all of them; None where they differ or there is none."""
        kinds = {(gpu.name, gpu.memory_total) for gpu in self.gpus or ()}
        return self.gpus[0] if self.gpus and len(kinds) == 1 else None


def read_gpus(server_url: str, dcgm_url: str | None = None) -> GpuReading:
    """The GPUs of the machine at `server_url`: NVML where that is this one, else the DCGM exporter.

    `dcgm_url` is the exporter's address, http://HOST:9400/metrics on the server's host unless given.
    """
    host = urlsplit(server_url).hostname or "localhost"
    local = read_nvml() if is_this_machine(host) else GpuReading(None, f"{host} is another machine")
    if local.gpus is not None and dcgm_url is None:
        return local
    shown = f"[{host}]" if ":" in host else host
    exporter = read_dcgm(dcgm_url or f"http://{shown}:{DCGM_PORT}/metrics")
    if exporter.gpus is not None:
        return exporter
    return local if local.gpus is not None else GpuReading(None, f"NVML: {local.reason}; DCGM: {exporter.reason}")


def is_this_machine(host: str) -> bool:
    """Whether a host name means the machine that capsim runs on, by its form alone."""
    if host == "localhost" or host.endswith(".localhost"):
        return True
    with contextlib.suppress(ValueError):
        return ipaddress.ip_address(host).is_loopback
    return False


def read_nvml() -> GpuReading:
    """The GPUs of this machine."""
    try:
        nvml: Any = importlib.import_module("pynvml")
    except ImportError:
        return GpuReading(None, "the package nvidia-ml-py is not installed")
    try:
        nvml.nvmlInit()
    except nvml.NVMLError as problem:
        return GpuReading(None, f"no NVIDIA driver ({problem})")
    try:
        gpus = tuple(_nvml_gpu(nvml, index) for index in range(nvml.nvmlDeviceGetCount()))
    except nvml.NVMLError as problem:
        return GpuReading(None, str(problem))
    finally:
        with contextlib.suppress(nvml.NVMLError):
            nvml.nvmlShutdown()
    return GpuReading(gpus) if gpus else GpuReading(None, "no GPU on this machine")


def _nvml_gpu(nvml: Any, index: int) -> Gpu:
    """One GPU; some cannot tell everything, such as those that share the memory of their host."""
    handle = nvml.nvmlDeviceGetHandleByIndex(index)
    told: dict[str, Any] = {}
    for name in ("Name", "MemoryInfo", "UtilizationRates"):
        with contextlib.suppress(nvml.NVMLError):
            told[name] = getattr(nvml, f"nvmlDeviceGet{name}")(handle)
    title, memory, rates = told.get("Name"), told.get("MemoryInfo"), told.get("UtilizationRates")
    return Gpu(
        index,
        title.decode(errors="replace") if isinstance(title, bytes) else title,
        None if memory is None else int(memory.total),
        None if memory is None else int(memory.used),
        None if rates is None else rates.gpu / 100,
    )


def read_dcgm(url: str, timeout: float = 3.0) -> GpuReading:
    """The GPUs that a DCGM exporter shows at `url`; `timeout` in seconds."""
    text, reason = fetch(url, timeout=timeout)
    return GpuReading(None, f"{shown_url(url)} {reason}") if text is None else gpus_in(text, url)


def gpus_in(text: str, url: str) -> GpuReading:
    """The GPUs in the metrics of a DCGM exporter at `url`."""
    try:
        samples = Samples(text)
    except ValueError:
        return GpuReading(None, f"{shown_url(url)} shows no metrics")
    gpus = _dcgm_gpus(samples)
    return GpuReading(gpus) if gpus else GpuReading(None, f"{shown_url(url)} shows no GPU")


def _dcgm_gpus(samples: Samples) -> tuple[Gpu, ...]:
    """The exporter has a series for every GPU; of a GPU cut into instances they are added up."""
    titles: dict[str, str | None] = {}
    values: dict[str, dict[str, float]] = {}
    for name in ("FB_USED", "FB_FREE", "FB_RESERVED", "FB_TOTAL", "GPU_UTIL"):
        for labels, value in samples.values.get(f"DCGM_FI_DEV_{name}", ()):
            number = labels.get("gpu", "0")
            titles.setdefault(number, one_line(labels.get("modelName", ""), 80) or None)
            known = values.setdefault(number, {})
            known[name] = known.get(name, 0.0) + value
    return tuple(_dcgm_gpu(number, titles[number], values[number]) for number in sorted(values, key=_number))


def _dcgm_gpu(number: str, title: str | None, known: dict[str, float]) -> Gpu:
    total = known.get("FB_TOTAL")
    if total is None and "FB_USED" in known and "FB_FREE" in known:
        total = known["FB_USED"] + known["FB_FREE"] + known.get("FB_RESERVED", 0.0)
    used, busy = known.get("FB_USED"), known.get("GPU_UTIL")
    return Gpu(
        _number(number),
        title,
        None if total is None or total > MOST_MIB else round(total * MIB),
        None if used is None or used > MOST_MIB else round(used * MIB),
        None if busy is None else min(1.0, busy / 100),
    )


def _number(text: str) -> int:
    return int(text) if re.fullmatch("[0-9]{1,9}", text) else -1


def fetch(
    url: str, *, headers: dict[str, str] | None = None, timeout: float = 10.0, insecure: bool = False
) -> tuple[str | None, str]:
    """What `url` answers; None and the reason where it does not.

    `timeout` in seconds; `insecure` takes any certificate.
    """
    return answer_of(_fetch(url, headers or {}, timeout, insecure))


async def _fetch(url: str, headers: dict[str, str], timeout: float, insecure: bool) -> tuple[str | None, str]:
    limits = aiohttp.ClientTimeout(total=timeout)
    try:
        async with (
            aiohttp.ClientSession(
                headers=headers, timeout=limits, connector=aiohttp.TCPConnector(ssl=not insecure)
            ) as session,
            session.get(url, allow_redirects=False) as response,
        ):
            if response.status != 200:
                return None, f"answers HTTP {response.status}"
            body = await response.content.read(MAX_BYTES)
            while not response.content.at_eof() and len(body) < MAX_BYTES:
                body += await response.content.read(MAX_BYTES - len(body))
            return body.decode(errors="replace"), ""
    except TimeoutError:
        return None, "does not answer in time"
    except (aiohttp.ClientError, OSError, ValueError):
        return None, "cannot be reached"
