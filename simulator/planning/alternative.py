"""A measured server started in another way: which profile stands for it, and what of that is assumed.

A flag that would change the result and is not modelled is refused by its name; one that would not is noted. Flags that
the line does not name stay as measured.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from simulator.engine.engine_flags import EngineFlags
from simulator.engine.fleet import Fleet
from simulator.flags.serve_line import ServeLine, Value
from simulator.flags.vllm_flags import change_flags, parse_size
from simulator.hardware.gpus import Gpu, GpuError, find_gpu
from simulator.hardware.kv_layout import dtype_bytes, kv_layout
from simulator.hardware.memory import MemoryAccount, MemoryAccountError, default_utilization, kv_pool
from simulator.hardware.model_config import ModelArchitecture, ModelError, find_model
from simulator.hardware.other_gpu import move, with_tensor_parallel
from simulator.planning.unmodelled import AlternativeError, judged
from simulator.profile import Coefficient, Profile

BASELINE = "as measured"
BATCH = ("max_num_seqs", "max_num_batched_tokens")  # whose activations take memory from the KV pool
POOL = ("gpu_memory_utilization", "kv_cache_memory_bytes", "num_gpu_blocks_override", "block_size", "kv_cache_dtype")
POOL_SENTENCE = "the KV pool of "  # how a sentence on it begins; the last change of the pool has the say
KV_DTYPE_DOUBT = 0.2  # relative standard error of reading a KV cache of another type at the same bandwidth
Z90 = 1.645
ONE = Fleet()


@dataclass(frozen=True)
class MeasuredMemory:
    """What is known of the measured server's memory beyond its profile.

    Attributes
        utilization: ``--gpu-memory-utilization`` it runs with; None for what the profile says, or its version's default
        account: from its log; None without
        model: its architecture; None to look it up by the profile's name for it
    """

    utilization: float | None = None
    account: MemoryAccount | None = None
    model: ModelArchitecture | None = None


@dataclass(frozen=True)
class Alternative:
    """Servers to simulate: each as `profile` has it, with its flags and KV pool, and how many as `fleet` says.

    `notes` say what was left out of account, `assumed` what was taken for granted, a sentence each.
    """

    name: str
    profile: Profile
    fleet: Fleet = ONE
    notes: tuple[str, ...] = ()
    assumed: tuple[str, ...] = ()

    @property
    def flags(self) -> EngineFlags:
        return self.profile.engine_flags


def alternative(profile: Profile, line: ServeLine, memory: MeasuredMemory | None = None) -> Alternative:
    """The server of `profile` started with the flags of `line`.

    Raises `AlternativeError` and other `FlagError`, `MemoryAccountError`, `ModelError` and `GpuError`, one line each.
    """
    notes = judged(profile, line)
    given = {name: value for name, value in line.given.items() if name in _MODELLED}
    if not given and not line.words:
        raise AlternativeError("it changes nothing: it names no flag that is modelled")
    server = _Server(profile, given, memory or MeasuredMemory())
    gpu = find_gpu(line.words["gpu"]) if "gpu" in line.words else server.gpu
    changed = server.here() if gpu is None or gpu == server.gpu else server.on(gpu)
    changed, assumed = server.with_other_steps(changed)
    of_steps = (text for text in changed.assumed if text not in profile.assumed and not text.startswith(POOL_SENTENCE))
    assumed = [*of_steps, *server.assumed, *assumed]
    fleet = _fleet(line)
    if fleet.data_parallel_size > 1:
        assumed.append(_data_parallel(server.model))
    return Alternative(line.label, changed, fleet, (*notes, *server.notes), tuple(dict.fromkeys(assumed)))


def _fleet(line: ServeLine) -> Fleet:
    """Replicas, router and data parallelism of the line."""
    replicas = _whole("--replicas", line.words.get("replicas", "1"))
    parallel = _whole("--data-parallel-size", line.given.get("data_parallel_size", "1"))
    return Fleet(replicas, line.words.get("router", Fleet.router), parallel)


def _data_parallel(model: ModelArchitecture | None) -> str:
    if model is not None and model.parameters.experts:
        raise AlternativeError(
            "--data-parallel-size of a mixture-of-experts model is not modelled: its engines run in step; "
            "--replicas is what independent servers would do"
        )
    return "every engine of --data-parallel-size has GPUs of its own and is as fast as the measured one"


# --- from flags to a profile

_ENGINE = {field.name for field in fields(EngineFlags)} - {"num_gpu_blocks", "block_size", "engine_version"}
_MODELLED = _ENGINE | set(POOL) | {"tensor_parallel_size", "data_parallel_size"}


class _Server:
    """The measured server and what is given to start it anew; `notes` and `assumed` come up on the way."""

    def __init__(self, profile: Profile, given: Mapping[str, Value], memory: MeasuredMemory) -> None:
        self.profile, self.given, self.memory = profile, given, memory
        self.notes: list[str] = []
        self.assumed: list[str] = []
        if given.get("max_model_len") in ("auto", "-1"):
            raise AlternativeError("--max-model-len auto is not modelled; give the number that vLLM's log tells")
        plain = {f"--{name.replace('_', '-')}": value for name, value in given.items() if name in _ENGINE}
        self.flags = change_flags(profile.engine_flags, plain)
        self.pool = {name: value for name, value in given.items() if name in POOL}
        self.ranks = _whole("--tensor-parallel-size", given.get("tensor_parallel_size", "1"))
        self.gpu = _known_gpu(profile)
        self.utilization = memory.utilization or profile.gpu_memory_utilization
        self.model = memory.model or _known_model(profile)
        self.dtype = _measured_dtype(profile, self.model)
        self._check_length()

    def on(self, gpu: Gpu) -> Profile:
        """On another card, which decides about the KV pool unless that is given."""
        moved = move(self.profile, gpu, self.memory.model, None, self.flags, self.utilization)
        if self.ranks > 1:
            moved = with_tensor_parallel(moved, self.ranks, self.memory.model, gpu, self.utilization)
        self._assume_utilization()
        if not self.pool:
            self._assume_pool(moved.engine_flags, f"what {self._cards(gpu)} would leave")
            return moved
        pool = kv_pool(
            moved.engine_flags,
            self.pool,
            moved.kv_bytes_per_token,
            self.model,
            gpu,
            tensor_parallel_size=self.ranks,
            **self._measured(),
        )
        moved = _with_pool(moved, moved.engine_flags, pool.simulated_blocks, pool.layout.block_size)
        if not self._states_the_pool():
            self._assume_pool(moved.engine_flags, f"what {self._cards(gpu)} would leave")
        return moved

    def here(self) -> Profile:
        """On the measured card, or several of them."""
        changes: dict[str, object] = {**self.pool}
        before = self.profile.engine_flags
        changes |= {name: getattr(self.flags, name) for name in _IN_ACCOUNT if self._differs(name)}
        server = self.profile.model_copy(update={"engine_flags": self.flags})
        if self.ranks > 1:
            server = with_tensor_parallel(server, self.ranks, self.memory.model, None, self.utilization)
            changes["tensor_parallel_size"] = self.ranks
        if not changes:
            return server
        if not self._sizes_the_pool() and not self._can_size():
            return server.model_copy(update={"engine_flags": self._without_account()})
        if "gpu_memory_utilization" in self.pool or self.ranks > 1:
            self._assume_utilization()
        model = self.model if self._knows_layout() else None
        pool = kv_pool(
            before, changes, self.profile.kv_bytes_per_token, model, self.gpu, self.memory.account, **self._measured()
        )
        server = _with_pool(server, self.flags, pool.simulated_blocks, pool.layout.block_size)
        if not self._states_the_pool() and server.engine_flags.kv_tokens != before.kv_tokens:
            self._assume_pool(server.engine_flags, self._origin())
        return server

    def with_other_steps(self, server: Profile) -> tuple[Profile, list[str]]:
        """What flags do to the duration of steps, and what is assumed in it."""
        before, after, assumed = self.profile.engine_flags, self.flags, []
        if before.enforce_eager != after.enforce_eager:
            _check_eager(self.profile, after.enforce_eager)
        if before.async_scheduling != after.async_scheduling:
            assumed.append(
                f"{'with' if after.async_scheduling else 'without'} asynchronous scheduling a step takes as long as "
                "measured; what the host does between steps was not measured apart"
            )
        if "kv_cache_dtype" in self.given:
            ratio = dtype_bytes(str(self.given["kv_cache_dtype"])) / dtype_bytes(self.dtype)
            if ratio != 1:
                assumed.append(
                    f"KV cache as {self.given['kv_cache_dtype']} is read in {ratio:g} times the time, and converting "
                    "it costs nothing; its effect on the answers is not judged"
                )
                server = _with_kv_bytes(server, ratio)
        return server, assumed

    # --- the KV pool

    def _measured(self) -> dict[str, Any]:
        known: dict[str, Any] = {"kv_cache_dtype": self.dtype}
        if self.utilization is not None:
            known["gpu_memory_utilization"] = self.utilization
        return known

    def _differs(self, name: str) -> bool:
        return bool(getattr(self.profile.engine_flags, name) != getattr(self.flags, name))

    def _states_the_pool(self) -> bool:
        """Whether the line gives the pool's size and not just what it follows from."""
        return bool({"kv_cache_memory_bytes", "num_gpu_blocks_override"} & self.pool.keys())

    def _cards(self, gpu: Gpu) -> str:
        return f"{f'{self.ranks} x ' if self.ranks > 1 else 'one '}{gpu.name}"

    def _origin(self) -> str:
        """From what the pool of another start on the measured card follows."""
        if self.memory.account is not None:
            return "computed from the server's log"
        if self.pool.keys() <= {"block_size", "kv_cache_dtype"} and self.ranks == 1 and not self._batch_differs():
            return "the same memory in other blocks"
        what = "and of what a step needs at its peak " if self._batch_differs() else ""
        return f"an estimate of the card's memory {what}by the model's architecture"

    def _batch_differs(self) -> bool:
        return any(self._differs(name) for name in (*BATCH, "enforce_eager"))

    def _assume_pool(self, flags: EngineFlags, origin: str) -> None:
        measured = self.profile.engine_flags.kv_tokens
        self.assumed.append(f"{POOL_SENTENCE}{flags.kv_tokens:,} tokens, {measured:,} as measured, is {origin}")

    def _sizes_the_pool(self) -> bool:
        """Whether the line says how large the pool is, or needs to know it."""
        return bool(self.pool.keys() - {"block_size"}) or self.ranks > 1

    def _can_size(self) -> bool:
        """Whether enough is known of the measured memory to size the pool anew."""
        if not self._knows_layout():
            return False
        blocks, account = self.profile.engine_flags.num_gpu_blocks, self.memory.account
        if account is not None or not self._batch_differs():
            return True
        try:
            changes = {"gpu_memory_utilization": self._likely_utilization}
            kv_pool(self.profile.engine_flags, changes, None, self.model, self.gpu, **self._measured())
        except MemoryAccountError:
            return False
        return blocks > 0

    def _knows_layout(self) -> bool:
        """Whether the known architecture has the measured bytes per token."""
        if self.model is None:
            return False
        size = self.profile.kv_bytes_per_token
        return size is None or size == kv_layout(self.model, 16, self.dtype).bytes_per_token

    def _without_account(self) -> EngineFlags:
        """The flags with the measured pool, where its memory is not known well enough to size it anew."""
        if self._batch_differs():
            self.notes.append(
                "the KV pool stays as measured: how much of the memory other --max-num-batched-tokens or "
                "--max-num-seqs take is not known; --server-log tells"
            )
        given = {"block_size": self.given["block_size"]} if "block_size" in self.given else {}
        return change_flags(self.flags, given, self.profile.kv_bytes_per_token)

    @property
    def _likely_utilization(self) -> float:
        return self.utilization or default_utilization(self.profile.engine_version)

    def _assume_utilization(self) -> None:
        if self.utilization is None and self.memory.account is None and not self._states_the_pool():
            self.assumed.append(
                f"the measured server runs at --gpu-memory-utilization {self._likely_utilization:g}, its version's "
                "default: the profile does not tell, and the KV pool is wrong by as much as this is; add "
                "gpu_memory_utilization to the profile, or give --measured-utilization to what-if"
            )

    def _check_length(self) -> None:
        longest = self.model.max_model_len if self.model else 0
        if self._differs("max_model_len") and longest and self.flags.max_model_len > longest:
            raise AlternativeError(
                f"--max-model-len {self.flags.max_model_len} is beyond the model's {longest}; vLLM refuses it"
            )


_IN_ACCOUNT = (*BATCH, "max_model_len", "async_scheduling", "enforce_eager")


def _with_pool(server: Profile, flags: EngineFlags, blocks: int, block_size: int) -> Profile:
    return server.model_copy(update={"engine_flags": flags.changed(num_gpu_blocks=blocks, block_size=block_size)})


def _with_kv_bytes(server: Profile, ratio: float) -> Profile:
    """KV cache of another size per token, which takes as much more or less to read."""
    step = dict(server.coefficients.step_time)
    if "per_kv_token" in step:
        step["per_kv_token"] = _scaled(step["per_kv_token"], ratio)
    coefficients = server.coefficients.model_copy(update={"step_time": step})
    size = server.kv_bytes_per_token
    return server.model_copy(
        update={"coefficients": coefficients, "kv_bytes_per_token": None if size is None else round(size * ratio)}
    )


def _scaled(term: Coefficient, ratio: float) -> Coefficient:
    relative = (term.stderr or 0.0) / term.value if term.value else 0.0
    stderr = term.value * ratio * (relative**2 + KV_DTYPE_DOUBT**2) ** 0.5
    value = term.value * ratio
    return Coefficient(
        value=value,
        stderr=stderr,
        low=max(value - Z90 * stderr, 0.0),
        high=value + Z90 * stderr,
        origin="assumed",
        note="KV cache of another type",
    )


def _check_eager(profile: Profile, eager: bool) -> None:
    """Refuses what was not measured: steps without CUDA graphs where there were some, or the reverse."""
    if not eager:
        raise AlternativeError(
            "--no-enforce-eager: the profile was measured without CUDA graphs, and what they would save is not known; "
            "calibrate a server that uses them"
        )
    if not profile.step_time.without_graph:
        raise AlternativeError(
            "--enforce-eager: the profile does not know what a step without CUDA graphs takes (without_graph); "
            "calibrate a server that runs with it"
        )


def _known_gpu(profile: Profile) -> Gpu | None:
    try:
        return find_gpu(profile.gpu) if profile.gpu else None
    except GpuError:
        return None


def _known_model(profile: Profile) -> ModelArchitecture | None:
    try:
        return find_model(profile.model)
    except ModelError:
        return None


def _measured_dtype(profile: Profile, model: ModelArchitecture | None) -> str:
    """The type of the measured KV cache: one byte a value where a token has half of what 16 bits take."""
    if model is None or profile.kv_bytes_per_token is None:
        return "auto"
    return "fp8" if 2 * profile.kv_bytes_per_token == kv_layout(model).bytes_per_token else "auto"


def _whole(flag: str, value: Value) -> int:
    try:
        return parse_size(str(value))
    except ValueError as problem:
        raise AlternativeError(f"{flag}: {problem}") from None
