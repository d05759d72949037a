"""A vLLM executor without a model: each engine step takes exactly as long as a formula says.

Everything else is the real vLLM 0.32: API server, tokenizer, engine core, scheduler, KV-cache manager, metrics. So a
client meets a server at the speed of a GPU whose step times are known, and a calibration can be held against the truth.

    vllm serve MODEL --distributed-executor-backend paced_executor.PacedExecutor   # this folder on PYTHONPATH

Environment variables, all optional:

CAPSIM_PACED_STEP
    JSON object with coefficients of `StepFormula`, such as '{"constant": 0.01, "noise": 0.05}'; others keep theirs.
CAPSIM_PACED_ASYNC
    1 (default) schedules a step while the one before runs, as vLLM does on a GPU; 0 schedules it after.
CAPSIM_PACED_LOG
    File for the truth: CSV, a line a step, written when the step is given to the device (see `StepLog`).
CAPSIM_PACED_KV_BYTES_PER_TOKEN
    KV cache per token, bytes, a multiple of 4; default 57,344 (Qwen2.5-7B in bfloat16).
CAPSIM_PACED_KV_MEMORY
    Memory of the KV cache, bytes, where --kv-cache-memory-bytes is not given; default 4,983,021,568 (86,896 tokens).
"""

import ctypes
import json
import math
import os
import random
import time
from collections import deque
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

import torch
from vllm.v1.core.sched.output import GrammarOutput, SchedulerOutput
from vllm.v1.executor.abstract import Executor
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheSpec
from vllm.v1.outputs import EMPTY_MODEL_RUNNER_OUTPUT, ModelRunnerOutput

TOKEN = 100  # every sampled token; an ordinary word in the vocabulary of make_model.py, not the end of a sequence
SPIN_S = 0.2e-3  # the last part of a step is waited for awake, because a sleep may end this much late
PR_SET_TIMERSLACK = 29  # from linux/prctl.h


@dataclass(slots=True)
class StepWork:
    """What one engine step computes.

    A sequence is in prefill when it computes prompt tokens, or more than one token (again, after a preemption);
    otherwise it is in decode. `kv_tokens` is the context that the decoding sequences read, and `prefill_attention` the
    sum over the prefill chunks of t * (context + t / 2), for a chunk of t tokens after `context` tokens.
    """

    sequences: int = 0
    prefill_tokens: int = 0
    prefill_attention: float = 0.0
    kv_tokens: int = 0

    def add(self, context: int, tokens: int, prompt: int) -> None:
        """Count a sequence that computes `tokens` more after `context`; its first `prompt` tokens are the prompt."""
        self.sequences += 1
        if tokens > 1 or context < prompt:
            self.prefill_tokens += tokens
            self.prefill_attention += tokens * (context + tokens / 2)
        else:
            self.kv_tokens += context


@dataclass(frozen=True, slots=True)
class StepFormula:
    """Duration of a step. Seconds per what the name says; the defaults resemble Qwen2.5-7B on an RTX 4090.

    `mixed_per_sequence` is paid for every sequence of a step that has any prefill. `noise` is the standard deviation of
    the logarithm of a factor whose median is 1. With `weights`, the part of `constant` in which the weights are read,
    computing overlaps with it: prompt tokens and sequences together cost hypot(weights, computing) - weights.
    """

    constant: float = 15.7e-3
    per_sequence: float = 35e-6
    per_kv_token: float = 62e-9
    per_prefill_token: float = 80e-6
    per_prefill_attention: float = 3.1e-9
    mixed_per_sequence: float = 0.0
    weights: float = 0.0
    noise: float = 0.0

    def seconds(self, work: StepWork, generator: random.Random) -> float:
        """Return the duration of a step with this work, seconds."""
        mixed = self.mixed_per_sequence if work.prefill_tokens else 0.0
        mean = (
            self.constant
            + (self.per_sequence + mixed) * work.sequences
            + self.per_kv_token * work.kv_tokens
            + self.computing(work)
            + self.per_prefill_attention * work.prefill_attention
        )
        return mean * (generator.lognormvariate(0.0, self.noise) if self.noise else 1.0)

    def computing(self, work: StepWork) -> float:
        """Return what the matrix multiplications take longer than the reading of the weights, seconds."""
        if not self.weights:
            return self.per_prefill_token * work.prefill_tokens
        tokens = work.prefill_tokens + work.sequences
        return math.hypot(self.weights, self.per_prefill_token * tokens) - self.weights


class StepLog:
    """The truth as CSV, a line a step.

    `start` is on Linux's monotonic clock (Python's `time.perf_counter` in any process of this machine), `seconds` the
    duration; the other columns are those of `StepWork`.
    """

    COLUMNS = "start,seconds,sequences,prefill_tokens,prefill_attention,kv_tokens"

    def __init__(self, path: Path) -> None:
        # line buffered, so that a reader sees every step and a killed server loses none
        self._file: TextIO = path.open("w", buffering=1)
        print(self.COLUMNS, file=self._file)

    def write(self, start: float, seconds: float, work: StepWork) -> None:
        """Add a step."""
        prefill = f"{work.prefill_tokens},{work.prefill_attention:.1f}"
        print(f"{start:.6f},{seconds:.9f},{work.sequences},{prefill},{work.kv_tokens}", file=self._file)

    def close(self) -> None:
        """End the file; a second call does nothing."""
        self._file.close()


class StepResult(Future[ModelRunnerOutput]):
    """Output of a step that ends at `deadline` on the clock of `time.perf_counter`.

    The engine waits for a step by asking for its result, so that is where time passes; no thread plays the device.
    """

    def __init__(self, output: ModelRunnerOutput, deadline: float) -> None:
        super().__init__()
        self._output = output
        self._deadline = deadline

    def done(self) -> bool:
        """Whether the step has ended."""
        return time.perf_counter() >= self._deadline

    def result(self, timeout: float | None = None) -> ModelRunnerOutput:
        """Wait for the end of the step; vLLM's engine core never gives a timeout."""
        while (left := self._deadline - time.perf_counter()) > 0:
            # sleep(0) lets the engine's input and output threads run, which a busy loop would keep from it
            time.sleep(left - SPIN_S if left > 2 * SPIN_S else 0)
        return self._output


class PacedExecutor(Executor):
    """The device: runs one step after the other, each for the time of the formula, and samples `TOKEN`."""

    supported_tasks = ("generate",)

    @classmethod
    def supports_async_scheduling(cls) -> bool:
        """Whether vLLM may schedule ahead; it asks before an instance exists."""
        return True

    def _init_executor(self) -> None:
        # vLLM's CPU platform has just turned this off; the engine core reads it after this call
        self.scheduler_config.async_scheduling = os.environ.get("CAPSIM_PACED_ASYNC", "1") == "1"
        self.formula = StepFormula(**json.loads(os.environ.get("CAPSIM_PACED_STEP", "{}")))
        log = os.environ.get("CAPSIM_PACED_LOG")
        self.log = StepLog(Path(log)) if log else None
        self.generator = random.Random(0)
        self.prompts: dict[str, int] = {}  # prompt tokens of every request that the scheduler has started
        self.free_at = 0.0  # end of the last step given to the device
        self.unsampled: deque[StepResult] = deque()  # steps for which vLLM has not yet called sample_tokens
        # the kernel may end a sleep 50 us late by default; this thread is the one that waits
        ctypes.CDLL(None).prctl(PR_SET_TIMERSLACK, 1000, 0, 0, 0)

    def execute_model(self, scheduler_output: SchedulerOutput, non_block: bool = False) -> Any:
        """Give a step to the device; its output comes from `sample_tokens`, as vLLM expects of a model that samples."""
        for request in scheduler_output.finished_req_ids:
            self.prompts.pop(request, None)
        if scheduler_output.total_num_scheduled_tokens == 0:
            return _finished(EMPTY_MODEL_RUNNER_OUTPUT) if non_block else EMPTY_MODEL_RUNNER_OUTPUT
        work, output = self._compute(scheduler_output)
        start = max(time.perf_counter(), self.free_at)
        seconds = self.formula.seconds(work, self.generator)
        self.free_at = start + seconds
        if self.log:
            self.log.write(start, seconds, work)
        self.unsampled.append(StepResult(output, self.free_at))
        return _finished(None) if non_block else None

    def sample_tokens(self, grammar_output: GrammarOutput | None, non_block: bool = False) -> Any:
        """Return the output of the oldest step that was not asked for yet, with `non_block` as a future."""
        step = self.unsampled.popleft()
        return step if non_block else step.result()

    def _compute(self, scheduled: SchedulerOutput) -> tuple[StepWork, ModelRunnerOutput]:
        """Return the work of a step, and a token for each sequence whose known tokens are all computed by it."""
        contexts, known = self._sequences(scheduled)
        work = StepWork()
        sampled: list[list[int]] = []
        for request, tokens in scheduled.num_scheduled_tokens.items():
            work.add(contexts[request], tokens, self.prompts[request])
            sampled.append([TOKEN] if contexts[request] + tokens >= known[request] else [])
        requests = list(scheduled.num_scheduled_tokens)
        index = {request: i for i, request in enumerate(requests)}
        return work, ModelRunnerOutput(req_ids=requests, req_id_to_index=index, sampled_token_ids=sampled)

    def _sequences(self, scheduled: SchedulerOutput) -> tuple[dict[str, int], dict[str, int]]:
        """Return, by request, the tokens computed before this step, and the tokens known (prompt and output)."""
        contexts: dict[str, int] = {}
        known: dict[str, int] = {}
        for new in scheduled.scheduled_new_reqs:
            self.prompts[new.req_id] = new.prompt_len
            contexts[new.req_id] = new.num_computed_tokens
            # a resumed request comes as a new one, with its output so far, where vLLM uses its second model runner
            known[new.req_id] = len(new.prefill_token_ids) if new.prefill_token_ids else new.prompt_len
        cached = scheduled.scheduled_cached_reqs
        for request, context, outputs in zip(
            cached.req_ids, cached.num_computed_tokens, cached.num_output_tokens, strict=True
        ):
            contexts[request] = context
            known[request] = self.prompts[request] + outputs  # outputs still on the device are counted too
        return contexts, known

    def get_kv_cache_specs(self) -> list[dict[str, KVCacheSpec]]:
        """Return one attention layer for all: its keys and values take the bytes per token of the whole model."""
        bytes_per_token = int(os.environ.get("CAPSIM_PACED_KV_BYTES_PER_TOKEN", "57344"))
        channels, rest = divmod(bytes_per_token, 4)  # a key and a value of 2 bytes each
        if rest:
            raise ValueError(f"CAPSIM_PACED_KV_BYTES_PER_TOKEN must be a multiple of 4, not {bytes_per_token}")
        spec = FullAttentionSpec(
            block_size=self.cache_config.block_size, num_kv_heads=1, head_size=channels, dtype=torch.bfloat16
        )
        return [{"layer": spec}]

    def determine_available_memory(self) -> list[int]:
        """Return the memory of the KV cache, bytes."""
        return [self.cache_config.kv_cache_memory_bytes or int(os.environ.get("CAPSIM_PACED_KV_MEMORY", "4983021568"))]

    def get_supported_kv_cache_layouts(self) -> list[list[str]]:
        """Return the layout that vLLM usually takes; nothing is ever laid out."""
        return [["LBNHC"]]

    def compile_or_warm_up_model(self) -> None:
        """Do nothing: there is no model to compile."""

    def collective_rpc(self, method: Any, *_args: Any, non_block: bool = False, **_kwargs: Any) -> Any:
        """Ignore any other message to the workers; the one worker answers None."""
        return _finished([None]) if non_block else [None]

    def check_health(self) -> None:
        """Do nothing: the device is always well."""

    def shutdown(self) -> None:
        """Close the log."""
        if self.log:
            self.log.close()


def _finished(value: Any) -> Future[Any]:
    """Return a future that already has its value."""
    future: Future[Any] = Future()
    future.set_result(value)
    return future
