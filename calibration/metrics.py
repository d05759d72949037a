"""What a vLLM server says of itself on /metrics, whatever its version.

Engines of a data-parallel server are added up; gauges of usage are averaged over them. A name that the server does not
have gives None. Server histograms have buckets too coarse for quantiles, so only their sums and counts are read: the
difference of two snapshots gives exact means.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from prometheus_client.parser import text_string_to_metric_families

# The newest name first; the first that the server has is read.
RUNNING = ("vllm:num_requests_running",)
WAITING = ("vllm:num_requests_waiting",)
KV_USAGE = ("vllm:kv_cache_usage_perc", "vllm:gpu_cache_usage_perc")
PREFIX_QUERIES = ("vllm:prefix_cache_queries_total", "vllm:gpu_prefix_cache_queries_total")
PREFIX_HITS = ("vllm:prefix_cache_hits_total", "vllm:gpu_prefix_cache_hits_total")
EXTERNAL_PREFIX_HITS = ("vllm:external_prefix_cache_hits_total",)

CACHE_CONFIG = "vllm:cache_config_info"

MOST = 1e18  # of any sample: a server of a million tokens a second needs 30,000 years

GAUGES = (*RUNNING, *WAITING, *KV_USAGE)
_GAUGE_BYTES = tuple(name.encode() for name in GAUGES)
# Asked for by name, and with this slash, vLLM gathers its gauges in 1 ms; all of /metrics holds up the streams for 5.
GAUGES_PATH = "/metrics/?" + "&".join(f"name[]={name}" for name in GAUGES)


@dataclass(frozen=True)
class SumCount:
    """A histogram without its buckets: the sum of all observations and their number."""

    sum: float
    count: float

    def __sub__(self, earlier: SumCount) -> SumCount:
        return SumCount(self.sum - earlier.sum, self.count - earlier.count)

    @property
    def mean(self) -> float | None:
        return self.sum / self.count if self.count > 0 else None


@dataclass(frozen=True)
class MetricsSnapshot:
    """One reading of /metrics. Counters count from the server's start; None is what the server does not tell."""

    running: int | None = None
    waiting: int | None = None
    kv_usage: float | None = None  # 0 to 1, share of the blocks in use
    preemptions: int | None = None
    prompt_tokens: int | None = None
    generation_tokens: int | None = None
    prefix_cache_queries: int | None = None  # tokens
    prefix_cache_hits: int | None = None  # tokens
    external_prefix_cache_hits: int | None = None  # tokens, from a store of KV outside the engine
    requests_finished: int | None = None  # for whatever reason
    ttft: SumCount | None = None  # s, from the frontend's arrival to its first output
    queue_time: SumCount | None = None  # s, from reaching the engine to being scheduled
    prefill_time: SumCount | None = None  # s, from being scheduled to the first token
    decode_time: SumCount | None = None  # s, from the first token to the last
    engines: int = 1  # data-parallel engines
    cache_config: dict[str, str] = field(default_factory=dict)  # labels of vllm:cache_config_info

    @property
    def idle(self) -> bool:
        """Nothing runs or waits, as far as the server tells."""
        return not self.running and not self.waiting


class MetricsError(ValueError):
    """A text that is not in the Prometheus format."""


class Samples:
    """Samples of a text in the Prometheus format, by name.

    Of equal samples the last counts. What is no number from 0 to `MOST` is left out, as if the server did not tell it.
    Raises `MetricsError`.
    """

    def __init__(self, text: str) -> None:
        found: dict[str, dict[tuple[tuple[str, str], ...], tuple[dict[str, str], float]]] = {}
        try:
            for family in text_string_to_metric_families(text):
                for sample in family.samples:
                    if 0 <= sample.value <= MOST:
                        labels = tuple(sorted(sample.labels.items()))
                        found.setdefault(sample.name, {})[labels] = (sample.labels, sample.value)
        except (ValueError, LookupError, TypeError, ArithmeticError) as problem:  # the parser raises all of these
            raise MetricsError("not in the Prometheus format") from problem
        self.values = {name: list(samples.values()) for name, samples in found.items()}

    def total(self, *names: str) -> float | None:
        """The sum over engines and labels of the first of `names` that is there."""
        for name in names:
            if name in self.values:
                return sum(value for _, value in self.values[name])
        return None

    def mean(self, *names: str) -> float | None:
        for name in names:
            if name in self.values:
                return sum(value for _, value in self.values[name]) / len(self.values[name])
        return None

    def count(self, *names: str) -> int | None:
        total = self.total(*names)
        return None if total is None else round(total)

    def histogram(self, name: str) -> SumCount | None:
        total, count = self.total(f"{name}_sum"), self.total(f"{name}_count")
        return None if total is None or count is None else SumCount(total, count)

    def labels(self, name: str) -> dict[str, str]:
        found = self.values.get(name)
        return dict(found[0][0]) if found else {}

    def engines(self) -> int:
        return max(1, len({labels.get("engine", "0") for labels, _ in self.values.get(RUNNING[0], [])}))


def parse_metrics(text: str) -> MetricsSnapshot:
    """Read the text of /metrics. Raises `MetricsError`."""
    samples = Samples(text)
    return MetricsSnapshot(
        running=samples.count(*RUNNING),
        waiting=samples.count(*WAITING),
        kv_usage=samples.mean(*KV_USAGE),
        preemptions=samples.count("vllm:num_preemptions_total"),
        prompt_tokens=samples.count("vllm:prompt_tokens_total"),
        generation_tokens=samples.count("vllm:generation_tokens_total"),
        prefix_cache_queries=samples.count(*PREFIX_QUERIES),
        prefix_cache_hits=samples.count(*PREFIX_HITS),
        external_prefix_cache_hits=samples.count(*EXTERNAL_PREFIX_HITS),
        requests_finished=samples.count("vllm:request_success_total"),
        ttft=samples.histogram("vllm:time_to_first_token_seconds"),
        queue_time=samples.histogram("vllm:request_queue_time_seconds"),
        prefill_time=samples.histogram("vllm:request_prefill_time_seconds"),
        decode_time=samples.histogram("vllm:request_decode_time_seconds"),
        engines=samples.engines(),
        cache_config=samples.labels(CACHE_CONFIG),
    )


def only_gauges(text: bytes) -> bytes:
    """The few lines of /metrics that change from moment to moment: cheap to cut out, so that parsing can wait."""
    return b"".join(line + b"\n" for line in text.split(b"\n") if line.startswith(_GAUGE_BYTES))
