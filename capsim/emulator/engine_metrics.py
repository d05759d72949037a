"""What the twin shows on /metrics, under vLLM's names of the profile's version.

Source: vLLM 0.32.0, `v1/metrics/loggers.py` and `buckets.py`. Times are seconds as a client measures them: those of a
twin that runs at a higher speed are shorter by it, and `capsim:speed` says so.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from simulator.engine.recorder import Recorder
from simulator.engine.request import Request
from simulator.engine.scheduler import Scheduler
from simulator.engine.step import Step

CONTENT_TYPE = CONTENT_TYPE_LATEST

_SCALE = (1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960, 1920, 7680)
_REQUEST = (0.3, 0.5, 0.8, *_SCALE)
_FIRST = (
    0.001,
    0.005,
    0.01,
    0.02,
    0.04,
    0.06,
    0.08,
    0.1,
    0.25,
    0.5,
    0.75,
    1,
    2.5,
    5,
    7.5,
    10,
    20,
    40,
    80,
    160,
    640,
    2560,
)
_GAP = (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80)
_STEP_TOKENS = tuple(2**power for power in (0, *range(3, 15)))
_TOKENS: tuple[float, ...] = ()  # 1, 2, 5, 10, ... up to max_model_len
_PREEMPTIONS = (1, 2, 3, 4, 5, 10, 20)
_LATE = (0.0001, 0.0002, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.1, 1)

# name: (first version that has it, words, buckets)
HISTOGRAMS: dict[str, tuple[tuple[int, int], str, tuple[float, ...]]] = {
    "time_to_first_token_seconds": ((0, 0), "Histogram of time to first token in seconds.", _FIRST),
    "inter_token_latency_seconds": ((0, 11), "Histogram of inter-token latency in seconds.", _GAP),
    "request_time_per_output_token_seconds": ((0, 12), "Histogram of time_per_output_token_seconds per request.", _GAP),
    "e2e_request_latency_seconds": ((0, 0), "Histogram of e2e request latency in seconds.", _REQUEST),
    "request_queue_time_seconds": ((0, 0), "Histogram of time spent in WAITING phase for request.", _REQUEST),
    "request_inference_time_seconds": ((0, 0), "Histogram of time spent in RUNNING phase for request.", _REQUEST),
    "request_prefill_time_seconds": ((0, 0), "Histogram of time spent in PREFILL phase for request.", _REQUEST),
    "request_decode_time_seconds": ((0, 0), "Histogram of time spent in DECODE phase for request.", _REQUEST),
    "request_prompt_tokens": ((0, 0), "Number of prefill tokens processed.", _TOKENS),
    "request_generation_tokens": ((0, 0), "Number of generation tokens processed.", _TOKENS),
    "request_params_max_tokens": ((0, 0), "Histogram of the max_tokens request parameter.", _TOKENS),
    "request_prefill_kv_computed_tokens": ((0, 13), "Histogram of new KV tokens computed during prefill.", _TOKENS),
    "request_num_preemptions": ((0, 30), "Histogram of the number of times a request was preempted.", _PREEMPTIONS),
    "iteration_tokens_total": ((0, 0), "Histogram of number of tokens per engine_step.", _STEP_TOKENS),
}
COUNTERS = {
    "num_preemptions": ((0, 0), "Cumulative number of preemption from the engine."),
    "prompt_tokens": ((0, 0), "Number of prefill tokens processed."),
    "prompt_tokens_cached": ((0, 16), "Number of cached prompt tokens (local + external)."),
    "generation_tokens": ((0, 0), "Number of generation tokens processed."),
    "prefix_cache_queries": ((0, 0), "Prefix cache queries, in terms of number of queried tokens."),
    "prefix_cache_hits": ((0, 0), "Prefix cache hits, in terms of number of cached tokens."),
}
REASONS = ("stop", "length", "abort", "error")


class StepRecorder(Recorder):
    """Hears of each step and remembers which requests have begun; keeps no tables, however long the server runs."""

    def __init__(self, on_step: Callable[[Step], None]) -> None:
        super().__init__()
        self._on_step = on_step
        self._begun: dict[Request, None] = {}
        self._prompt_tokens = 0

    def begun(self) -> list[Request]:
        """Requests that were admitted and whose end was not told yet, in the order of their admission."""
        found = list(self._begun)
        for request in found:
            if request.finished:
                del self._begun[request]
        return found

    def take_prompt_tokens(self) -> int:
        """Prompt tokens of the step that was processed since the last call."""
        tokens, self._prompt_tokens = self._prompt_tokens, 0
        return tokens

    def record_prompts(self, time: float, tokens: int) -> None:
        self._prompt_tokens = tokens

    def record_state(self, time: float, scheduler: Scheduler, step: Step) -> None:
        self._begun.update(dict.fromkeys(step.admitted))
        self._on_step(step)

    def record_request(self, request: Request) -> None:
        pass

    def record_gap(self, time: float, gap: float, count: int) -> None:
        pass


class EngineMetrics:
    """Counters, gauges and histograms of one engine."""

    def __init__(
        self,
        model: str,
        version: tuple[int, int],
        max_model_len: int,
        cache_config: dict[str, str],
        speed: float = 1.0,
        caching: bool = False,
    ) -> None:
        """`version` is vLLM's, `cache_config` the labels of its ``cache_config_info``."""
        self.recorder = StepRecorder(self._record_step)
        self._registry = CollectorRegistry()
        self._labels = {"model_name": model, "engine": "0"}
        self._caching = caching
        self._counters = {
            name: self._counter(name, words) for name, (since, words) in COUNTERS.items() if version >= since
        }
        self._histograms = {
            name: self._histogram(name, words, buckets or _one_two_five(max_model_len))
            for name, (since, words, buckets) in HISTOGRAMS.items()
            if version >= since
        }
        success = Counter(
            "vllm:request_success",
            "Count of successfully processed requests.",
            [*self._labels, "finished_reason"],
            registry=self._registry,
        )
        self._ends = {reason: success.labels(**self._labels, finished_reason=reason) for reason in REASONS}
        config = Gauge(
            "vllm:cache_config_info",
            "Information of the LLMEngine CacheConfig",
            ["engine", *cache_config],
            registry=self._registry,
        )
        config.labels(engine="0", **cache_config).set(1)
        Gauge("capsim:speed", "Simulated seconds in a second.", registry=self._registry).set(speed)
        self._late = Histogram(
            "capsim:delivery_lateness_seconds",
            "How much later than due the tokens of a step were sent, all of them.",
            buckets=_LATE,
            registry=self._registry,
        )

    def watch(self, scheduler: Scheduler, arriving: Callable[[], int]) -> None:
        """Show the gauges of a scheduler; `arriving` is the number of requests that it does not know yet."""
        self._gauge(
            "num_requests_running",
            "Number of requests in model execution batches.",
            lambda: len(scheduler.running),
        )
        self._gauge(
            "num_requests_waiting",
            "Number of requests waiting to be processed.",
            lambda: len(scheduler.waiting) + arriving(),
        )
        self._gauge(
            "kv_cache_usage_perc",
            "KV-cache usage. 1 means 100 percent usage.",
            lambda: scheduler.used_blocks / scheduler.flags.usable_blocks,
        )

    def text(self, names: Sequence[str] = ()) -> bytes:
        """All of it in the Prometheus format, or only the samples of these names."""
        return generate_latest(self._registry.restricted_registry(names) if names else self._registry)

    # --- what happens

    def record_first(self, request: Request, ttft: float) -> None:
        """A first token, `ttft` seconds after the request."""
        self._observe("time_to_first_token_seconds", ttft)
        self._count("prompt_tokens", request.prompt_tokens)
        self._count("prompt_tokens_cached", request.cached)

    def record_gap(self, gap: float) -> None:
        """A later token, `gap` seconds after the one before."""
        self._observe("inter_token_latency_seconds", gap)

    def record_tokens(self, tokens: int) -> None:
        self._count("generation_tokens", tokens)

    def record_delivery(self, late: float) -> None:
        """All tokens of a step were sent, `late` seconds after they were due."""
        self._late.observe(late)

    def record_abort(self, request: Request) -> None:
        self._ends["abort"].inc()

    def record_end(self, request: Request, first: float, last: float, speed: float) -> None:
        """A complete answer, whose first and last token were seen at these simulated seconds."""
        tokens = request.output_tokens
        self._ends["length" if tokens == request.max_tokens else "stop"].inc()
        self._observe("e2e_request_latency_seconds", (last - request.sent) / speed)
        self._observe("request_queue_time_seconds", (request.scheduled - request.arrived) / speed)
        self._observe("request_prefill_time_seconds", (request.first_token - request.scheduled) / speed)
        self._observe("request_decode_time_seconds", (request.ended - request.first_token) / speed)
        self._observe("request_inference_time_seconds", (request.ended - request.scheduled) / speed)
        if tokens > 1:
            self._observe("request_time_per_output_token_seconds", (last - first) / (tokens - 1) / speed)
        self._observe("request_prompt_tokens", request.prompt_tokens)
        self._observe("request_generation_tokens", tokens)
        self._observe("request_params_max_tokens", request.max_tokens)
        self._observe("request_prefill_kv_computed_tokens", request.prompt_tokens - request.cached)
        self._observe("request_num_preemptions", request.preemptions)

    def _record_step(self, step: Step) -> None:
        if not step.is_empty:
            self._observe("iteration_tokens_total", step.decodes + sum(chunk.tokens for chunk in step.chunks))
        self._count("num_preemptions", len(step.preempted))
        if self._caching:
            for request in step.admitted:
                if not request.preemptions:
                    self._count("prefix_cache_queries", request.prompt_tokens)
                    self._count("prefix_cache_hits", request.cached)

    def _observe(self, name: str, value: float) -> None:
        if name in self._histograms:
            self._histograms[name].observe(value)

    def _count(self, name: str, value: int) -> None:
        if value and name in self._counters:
            self._counters[name].inc(value)

    def _counter(self, name: str, words: str) -> Counter:
        return Counter(f"vllm:{name}", words, list(self._labels), registry=self._registry).labels(**self._labels)

    def _histogram(self, name: str, words: str, buckets: Sequence[float]) -> Histogram:
        names = list(self._labels)
        return Histogram(f"vllm:{name}", words, names, buckets=buckets, registry=self._registry).labels(**self._labels)

    def _gauge(self, name: str, words: str, value: Callable[[], float]) -> None:
        gauge = Gauge(f"vllm:{name}", words, list(self._labels), registry=self._registry)
        gauge.labels(**self._labels).set_function(value)


def _one_two_five(largest: int) -> list[float]:
    """1, 2, 5, 10, 20, ... up to `largest`."""
    return [step * 10**power for power in range(12) for step in (1, 2, 5) if step * 10**power <= largest]
