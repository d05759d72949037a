"""vllm_scheduler.py CASES DUMPS: what vLLM's own scheduler decides, step by step, without a model, a GPU or real time.

CASES holds one JSON object a line, ``{"name": ..., "config": {...}, "workload": [...]}``; DUMPS gets one line for each,
the case with its `events` (format: tests/simulator/conformance.py). `--write-dumps DIRECTORY` writes the cases of
`SMALL_SET` instead, a file each: so tests/simulator/dumps was made.

vLLM's `Scheduler` or `AsyncScheduler` decides, and vLLM's `EngineCore.step` or `step_with_batch_queue` drives it; only
the device is made up: a step takes `base + per_token * tokens` seconds on a clock of its own.

Runs in the virtual environment of install_vllm.sh.
"""

import argparse
import contextlib
import gzip
import json
import logging
import queue
import random
import tempfile
from collections import deque
from pathlib import Path
from typing import Any

import torch
import vllm
from make_model import PRESETS
from vllm.config import CacheConfig, ModelConfig, SchedulerConfig, VllmConfig
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.engine import EngineCoreOutputs
from vllm.v1.engine.core import EngineCore
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.outputs import EMPTY_MODEL_RUNNER_OUTPUT, ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus
from vllm.v1.structured_output import StructuredOutputManager

Event = dict[str, Any]
Config = dict[str, Any]

IDLE_SLEEP = 1e-3  # s, as in `EngineCore._process_engine_step`
STOP_TOKEN = 2
TOKENS_APART = 1_000_000  # between the first token ids of two requests, or of two shared prefixes
SHARED_TOKENS = 1_000_000_000_000  # first token id of shared prefixes, beyond those of any request

DEFAULTS: Config = {
    "max_num_seqs": 16,
    "max_num_batched_tokens": 128,
    "max_model_len": 512,
    "num_blocks": 400,
    "block_size": 16,
    "chunked_prefill": True,
    "prefix_caching": False,
    "long_prefill_token_threshold": 0,
    "long_prefill_token_threshold_adaptive": False,
    "policy": "fcfs",
    "watermark": 0.0,
    "reserve_full_isl": True,
    "async": True,
    "cost": {"base": 0.01, "per_token": 2e-5},
}


class Clock:
    """Made-up time, s."""

    now = 0.0


class StepResult:
    """The output of a step; to ask for it is to wait for the step's end."""

    def __init__(self, clock: Clock, end: float, output: ModelRunnerOutput | None) -> None:
        self._clock = clock
        self._end = end
        self._output = output

    def result(self) -> ModelRunnerOutput | None:
        self._clock.now = max(self._clock.now, self._end)
        return self._output


class Device:
    """Stands where vLLM has its model executor: runs a step after the other and samples tokens that never repeat."""

    def __init__(self, clock: Clock, cost: dict[str, float]) -> None:
        self.clock = clock
        self.cost = cost
        self.requests: dict[str, Request] = {}
        self.stops: dict[str, int] = {}  # number of the output token that is the stop token
        self.first_tokens: dict[str, int] = {}
        self.free_at = 0.0
        self.unsampled: deque[StepResult] = deque()

    def execute_model(self, step: SchedulerOutput, non_block: bool = False) -> StepResult:
        assert non_block
        tokens = step.total_num_scheduled_tokens
        if tokens == 0:
            return StepResult(self.clock, self.clock.now, EMPTY_MODEL_RUNNER_OUTPUT)
        self.free_at = max(self.free_at, self.clock.now) + self.cost["base"] + self.cost["per_token"] * tokens
        self.unsampled.append(StepResult(self.clock, self.free_at, self._sample(step)))
        return StepResult(self.clock, self.clock.now, None)

    def sample_tokens(self, _grammar: None, non_block: bool = False) -> StepResult | ModelRunnerOutput | None:
        oldest = self.unsampled.popleft()
        return oldest if non_block else oldest.result()

    def _sample(self, step: SchedulerOutput) -> ModelRunnerOutput:
        ids = list(step.num_scheduled_tokens)
        return ModelRunnerOutput(
            req_ids=ids,
            req_id_to_index={request: index for index, request in enumerate(ids)},
            sampled_token_ids=[self._next_token(self.requests[request]) for request in ids],
        )

    def _next_token(self, request: Request) -> list[int]:
        if request.is_prefill_chunk:
            return []
        number = request.num_computed_tokens - request.num_prompt_tokens + 1
        if number == self.stops.get(request.request_id):
            return [STOP_TOKEN]
        return [self.first_tokens[request.request_id] + request.num_prompt_tokens + number]


class Engine(EngineCore):
    """vLLM's engine core around a scheduler that is watched and a device that is made up; no processes, no model."""

    def __init__(self, config: Config, vllm_config: VllmConfig) -> None:
        self.clock = Clock()
        self.events: list[Event] = []
        self.iteration = 0
        self.vllm_config = vllm_config
        self.model_executor: Any = Device(self.clock, config["cost"])
        self.scheduler: Any = _watched_scheduler(self, config, vllm_config)
        self.block_hasher = _block_hasher(config)
        self.batch_queue = deque(maxlen=2) if config["async"] else None
        self.batch_queue_size = 2 if config["async"] else 1
        self.step_fn = self.step_with_batch_queue if config["async"] else self.step
        self.aborts_queue: queue.Queue[list[str]] = queue.Queue()
        self.log_stats = self.is_mm_encoder_only = self.is_pooling_model = False
        self.check_for_draft_tokens = False
        self._weight_version = "default"

    def run(self, workload: list[dict[str, Any]]) -> list[Event]:
        """Serve a workload as `EngineCore.run_busy_loop` does; returns the events."""
        timed = "arrival_time" in workload[0]
        key = "arrival_time" if timed else "arrival_step"
        pending = [(entry[key], number, entry) for number, entry in enumerate(workload)]
        while pending or self.has_work():
            if not self.has_work():
                self._wait_until(min(pending)[0], timed)
            now = self.clock.now if timed else self.iteration
            arrived = [entry for entry in pending if entry[0] <= now]
            pending = [entry for entry in pending if entry[0] > now]
            if arrived:
                self._add(sorted(arrived) if timed else arrived)
            _outputs, executed = self.step_fn()
            if not executed and self.scheduler.has_requests():
                self.clock.now += IDLE_SLEEP
            self.iteration += 1
        return self.events

    def has_work(self) -> bool:
        return bool(self.scheduler.has_requests() or self.batch_queue)

    def _wait_until(self, moment: float, timed: bool) -> None:
        if timed:
            self.clock.now = max(self.clock.now, moment)
        else:
            self.iteration = max(self.iteration, int(moment))

    def _add(self, arrived: list[tuple[float, int, dict[str, Any]]]) -> None:
        for moment, number, entry in arrived:
            request = self._request(number, moment, entry)
            self.model_executor.requests[entry["id"]] = request
            self.model_executor.first_tokens[entry["id"]] = TOKENS_APART * (number + 1)
            self.model_executor.stops[entry["id"]] = entry.get("stop_len", 0)
            self.scheduler.add_request(request)
        self.events.append({"ev": "add", "it": self.iteration, "ids": [entry["id"] for *_, entry in arrived]})

    def _request(self, number: int, moment: float, entry: dict[str, Any]) -> Request:
        prompt = [TOKENS_APART * (number + 1) + position for position in range(entry["prompt_len"])]
        shared = entry.get("prefix_len", 0)
        first_shared = SHARED_TOKENS + TOKENS_APART * entry.get("prefix_id", 0)
        prompt[:shared] = range(first_shared, first_shared + shared)
        return Request(
            request_id=entry["id"],
            prompt_token_ids=prompt,
            sampling_params=SamplingParams(
                max_tokens=entry["output_len"], stop_token_ids=[STOP_TOKEN], ignore_eos=True
            ),
            pooling_params=None,
            arrival_time=float(moment),
            priority=entry.get("priority", 0),
            block_hasher=self.block_hasher,
        )

    def record(self, event: Event) -> None:
        event["it"] = self.iteration
        event["t"] = round(self.clock.now, 6)
        self.events.append(event)


def _watched_scheduler(engine: Engine, config: Config, vllm_config: VllmConfig) -> Any:
    """vLLM's scheduler for this configuration, which tells `engine` of all that it decides."""
    base: Any = vllm_config.scheduler_config.get_scheduler_cls()

    class Watched(base):
        steps = 0
        processed = 0
        preempted: list[str]

        def schedule(self, *args: Any) -> SchedulerOutput:
            self.preempted = []
            before = {request.request_id for request in self.running}
            resumable = {request.request_id for request in self.waiting if request.status == RequestStatus.PREEMPTED}
            step: SchedulerOutput = super().schedule(*args)
            admitted = [request for request in step.num_scheduled_tokens if request not in before]
            self.steps += 1
            engine.record(
                {
                    "ev": "schedule",
                    "step": self.steps,
                    "n": dict(step.num_scheduled_tokens),
                    "total": step.total_num_scheduled_tokens,
                    "samples": [r for r in step.num_scheduled_tokens if not self.requests[r].is_prefill_chunk],
                    "new": [request for request in admitted if request not in resumable],
                    "resumed": sorted(request for request in admitted if request in resumable),
                    "admitted": admitted,
                    "preempted": self.preempted,
                    "running": [request.request_id for request in self.running],
                    "waiting": [request.request_id for request in self.waiting],
                    "free": self.kv_cache_manager.block_pool.get_num_free_blocks(),
                }
            )
            return step

        def _preempt_request(self, request: Request, *args: Any, **kwargs: Any) -> None:
            self.preempted.append(request.request_id)
            super()._preempt_request(request, *args, **kwargs)

        def update_from_output(self, step: SchedulerOutput, output: ModelRunnerOutput) -> dict[int, EngineCoreOutputs]:
            outputs: dict[int, EngineCoreOutputs] = super().update_from_output(step, output)
            answers = outputs[0].outputs if 0 in outputs else []
            self.processed += 1
            engine.record(
                {
                    "ev": "update",
                    "step": self.processed,
                    "tokens": [answer.request_id for answer in answers if answer.new_token_ids],
                    "finished": [answer.request_id for answer in answers if answer.finish_reason is not None],
                    "free": self.kv_cache_manager.block_pool.get_num_free_blocks(),
                }
            )
            return outputs

    return Watched(
        vllm_config=vllm_config,
        kv_cache_config=_kv_cache_config(config),
        structured_output_manager=StructuredOutputManager(vllm_config),
        block_size=config["block_size"],
    )


def _kv_cache_config(config: Config) -> KVCacheConfig:
    spec = FullAttentionSpec(block_size=config["block_size"], num_kv_heads=1, head_size=1, dtype=torch.float32)
    group = KVCacheGroupSpec(["layer"], spec)
    return KVCacheConfig(num_blocks=config["num_blocks"], kv_cache_tensors=[], kv_cache_groups=[group])


def _block_hasher(config: Config) -> Any:
    if not config["prefix_caching"]:
        return None
    algorithm = get_hash_fn_by_name("sha256")
    init_none_hash(algorithm)
    return get_request_block_hasher(config["block_size"], algorithm)


def _vllm_config(config: Config, model: ModelConfig) -> VllmConfig:
    model.max_model_len = config["max_model_len"]
    scheduler = SchedulerConfig(
        max_num_seqs=config["max_num_seqs"],
        max_num_batched_tokens=config["max_num_batched_tokens"],
        max_model_len=config["max_model_len"],
        is_encoder_decoder=False,
        enable_chunked_prefill=config["chunked_prefill"],
        long_prefill_token_threshold=config["long_prefill_token_threshold"],
        long_prefill_token_threshold_adaptive=config["long_prefill_token_threshold_adaptive"],
        policy=config["policy"],
        watermark=config["watermark"],
        scheduler_reserve_full_isl=config["reserve_full_isl"],
    )
    cache = CacheConfig(block_size=config["block_size"], enable_prefix_caching=config["prefix_caching"])
    cache.num_gpu_blocks = config["num_blocks"]
    result = VllmConfig(model_config=model, scheduler_config=scheduler, cache_config=cache)
    result.scheduler_config.async_scheduling = config["async"]  # the CPU platform has just turned it off
    _check_applied(config, result)
    return result


def _check_applied(config: Config, applied: VllmConfig) -> None:
    """vLLM adjusts some flags to the platform; a dump must say what it ran with."""
    scheduler, cache = applied.scheduler_config, applied.cache_config
    assert scheduler.max_num_batched_tokens == config["max_num_batched_tokens"]
    assert scheduler.max_num_seqs == config["max_num_seqs"]
    assert scheduler.enable_chunked_prefill == config["chunked_prefill"]
    assert scheduler.long_prefill_token_threshold == config["long_prefill_token_threshold"]
    assert applied.model_config.max_model_len == config["max_model_len"]
    assert cache.enable_prefix_caching == config["prefix_caching"]
    assert cache.block_size == config["block_size"]


def dump(case: dict[str, Any], model: ModelConfig) -> dict[str, Any]:
    """Run a case; a config may leave out what is in `DEFAULTS`."""
    config = DEFAULTS | case["config"]
    events = Engine(config, _vllm_config(config, model)).run(case["workload"])
    return {
        "head": {"name": case["name"], "vllm": vllm.__version__.split("+")[0], "config": config},
        "workload": case["workload"],
        "events": events,
    }


# --- the small set that tests/simulator carries


def requests(
    count: int, prompt: tuple[int, int], output: tuple[int, int], every: float = 1.0, seed: int = 0, **extra: Any
) -> list[dict[str, Any]]:
    """Requests of random lengths that arrive `every` few iterations; `extra` may be a list to choose from at random."""
    generator = random.Random(seed)
    workload = []
    for number in range(count):
        entry: dict[str, Any] = {"id": f"r{number}", "arrival_step": int(number * every)}
        entry["prompt_len"] = generator.randint(*prompt)
        entry["output_len"] = generator.randint(*output)
        for name, value in extra.items():
            entry[name] = generator.choice(value) if isinstance(value, list) else value
        workload.append(entry)
    return workload


def timed(workload: list[dict[str, Any]], rate: float) -> list[dict[str, Any]]:
    """The same requests as a Poisson process in time, `rate` a second."""
    generator = random.Random(1)
    moment = 0.0
    for entry in workload:
        del entry["arrival_step"]
        entry["arrival_time"] = moment
        moment = round(moment + generator.expovariate(rate), 6)
    return workload


def shared(workload: list[dict[str, Any]], prefixes: int, share: tuple[float, float]) -> list[dict[str, Any]]:
    """The same requests with prompts that start like others'."""
    generator = random.Random(2)
    for entry in workload:
        entry["prefix_id"] = generator.randrange(prefixes)
        entry["prefix_len"] = int(entry["prompt_len"] * generator.uniform(*share))
    return workload


LONG, SHORT = (20, 200), (5, 60)

SMALL_SET: dict[str, tuple[Config, list[dict[str, Any]]]] = {
    "plain_sync": ({"async": False}, requests(40, LONG, SHORT)),
    "plain_async": ({}, requests(40, LONG, SHORT)),
    "tight_pool_sync": ({"async": False, "num_blocks": 30}, requests(40, LONG, SHORT)),
    "tight_pool_async": ({"num_blocks": 30}, requests(40, LONG, SHORT)),
    "no_reserve_async": ({"num_blocks": 30, "reserve_full_isl": False}, requests(40, LONG, SHORT)),
    "threshold_sync": (
        {"async": False, "long_prefill_token_threshold": 24, "num_blocks": 60},
        requests(40, LONG, SHORT),
    ),
    "threshold_adaptive_async": (
        {"long_prefill_token_threshold": 24, "long_prefill_token_threshold_adaptive": True},
        requests(40, LONG, SHORT, every=4),
    ),
    # in the next two, requests are preempted in the very step that gave them a block
    "priority_async": (
        {"policy": "priority", "num_blocks": 40, "block_size": 4},
        timed(requests(50, (5, 40), (20, 100), seed=8, priority=list(range(10))), rate=30),
    ),
    "priority_prefix_async": (
        {
            "policy": "priority",
            "num_blocks": 15,
            "block_size": 8,
            "prefix_caching": True,
            "max_num_seqs": 4,
            "reserve_full_isl": False,
            "long_prefill_token_threshold": 5,
        },
        timed(requests(20, (13, 45), (4, 57), seed=14, priority=[0, 1, 2]), rate=30),
    ),
    "priority_sync": (
        {"async": False, "policy": "priority", "num_blocks": 30},
        requests(40, LONG, SHORT, priority=[0, 0, 1, 2]),
    ),
    "prefix_shared_async": (
        {"prefix_caching": True, "num_blocks": 40},
        shared(requests(50, LONG, SHORT), prefixes=4, share=(0.0, 1.0)),
    ),
    "prefix_identical_sync": (
        {"prefix_caching": True, "async": False, "num_blocks": 60},
        shared(requests(40, (128, 128), (5, 40), every=0.5), prefixes=2, share=(1.0, 1.0)),
    ),
    "prefix_unique_tight_async": ({"prefix_caching": True, "num_blocks": 30}, requests(40, LONG, SHORT)),
    "stop_tokens_async": (
        {"num_blocks": 40, "max_model_len": 256},
        requests(40, LONG, (60, 90), stop_len=[1, 2, 7, 15, 16, 17, 40, 59]),
    ),
    "unchunked_watermark_sync": (
        {
            "async": False,
            "chunked_prefill": False,
            "max_model_len": 260,
            "max_num_batched_tokens": 260,
            "num_blocks": 18,
            "watermark": 0.3,
        },
        requests(40, LONG, SHORT, every=0.5),
    ),
    "unchunked_async": (
        {"chunked_prefill": False, "max_model_len": 260, "max_num_batched_tokens": 260, "num_blocks": 80},
        requests(40, LONG, SHORT, every=0.5),
    ),
    "max_model_len_block_128_async": (
        {"max_model_len": 300, "num_blocks": 9, "block_size": 128},
        requests(30, (100, 290), (100, 400)),
    ),
    "in_time_sync": ({"async": False, "num_blocks": 60}, timed(requests(40, LONG, SHORT), rate=20)),
    "in_time_async": ({"num_blocks": 60}, timed(requests(40, LONG, SHORT), rate=20)),
}


def write_small_set(directory: Path, model: ModelConfig) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    for name, (config, workload) in SMALL_SET.items():
        result = dump({"name": name, "config": config, "workload": workload}, model)
        text = json.dumps(result, separators=(",", ":"))
        path = directory / f"{name}.json.gz"
        path.write_bytes(gzip.compress(text.encode(), mtime=0))
        preemptions = sum(len(event.get("preempted", ())) for event in result["events"])
        print(f"{path}: {len(result['events'])} events, {preemptions} preemptions, {path.stat().st_size} bytes")


def answer_cases(cases: Path, dumps: Path, model: ModelConfig) -> None:
    with cases.open() as lines, dumps.open("w") as out:
        for line in lines:
            print(json.dumps(dump(json.loads(line), model), separators=(",", ":")), file=out, flush=True)


@contextlib.contextmanager
def model_config() -> Any:
    """vLLM's configuration of some small model; nothing of it matters to the scheduler but its length limit."""
    with tempfile.TemporaryDirectory() as directory:
        PRESETS["tiny"].config().save_pretrained(directory)
        yield ModelConfig(model=directory, skip_tokenizer_init=True, max_model_len=4096)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cases", type=Path, nargs="?", metavar="CASES")
    parser.add_argument("dumps", type=Path, nargs="?", metavar="DUMPS")
    parser.add_argument("--write-dumps", type=Path, metavar="DIRECTORY")
    arguments = parser.parse_args()
    logging.disable(logging.WARNING)  # vLLM has remarks on every configuration
    with model_config() as model:
        if arguments.write_dumps:
            write_small_set(arguments.write_dumps, model)
        else:
            answer_cases(arguments.cases, arguments.dumps, model)


if __name__ == "__main__":
    main()
