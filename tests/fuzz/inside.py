"""Readers of what people write for capsim, and of what it wrote itself."""

from __future__ import annotations

import dataclasses
import json
import math
import shlex
import tempfile
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import typer

from capsim.errors import CommandError
from capsim.load_options import parsed, with_load
from capsim.options import request_shapes, seconds_of, with_engine_flags
from capsim.replay import replay_of
from simulator.engine.engine_flags import FlagError
from simulator.engine.routers import RouterError, make_router
from simulator.engine.scheduler import CannotFit
from simulator.flags.serve_line import read_line, read_lines
from simulator.flags.vllm_flags import change_flags
from simulator.hardware.gpus import GpuError, find_gpu
from simulator.hardware.kv_layout import kv_layout
from simulator.hardware.memory import MemoryAccountError
from simulator.hardware.model_config import ModelError, find_model, read_model
from simulator.loads.arrivals import parse_curve, parse_seconds, parse_think_time
from simulator.loads.lengths import Length, parse_length
from simulator.loads.levels import LoadError
from simulator.loads.sessions import Sessions, parse_talk
from simulator.loads.trace import Trace, TraceError
from simulator.loads.workload import ClosedLoop, Load, OpenLoop, Shape, Workload
from simulator.planning.alternative import alternative
from simulator.planning.search_log import SearchLog, SearchLogError
from simulator.planning.search_space import SpaceError, parse_counts, parse_prices, parse_vary
from simulator.planning.targets import figures_of, join_targets
from simulator.prediction import predict
from simulator.profile import Profile, ProfileError
from simulator.results.run import RECORD_COLUMNS, TOKEN_COLUMNS, Level, Run
from simulator.results.run_files import RunFileError, load_run, save_run
from simulator.results.summary import Summary, summarize
from simulator.scenario import Scenario
from simulator.yaml_file import DocumentError, KeyProblem
from tests.conftest import PROFILE
from tests.fuzz.reader import Reader, of_file, of_text, scratch

USAGE = typer.BadParameter.__mro__[1]  # of the parser that Typer brings along
SCENARIOS = Path(__file__).parents[2] / "scenarios"
SHIPPED = SCENARIOS / "profiles"
FEW = 2_000  # requests that are drawn of an accepted load


def texts(*lines: str) -> Callable[[], list[bytes]]:
    return lambda: [line.encode() for line in lines]


@cache
def demo() -> Profile:
    path = scratch() / "demo.yaml"
    path.write_text(PROFILE)
    return Profile.load(path)


@cache
def shipped() -> Profile:
    return Profile.load(SHIPPED / "rtx4090-qwen2.5-7b.yaml")


# --- what was accepted is used


def draw(load: Load) -> None:
    """Draws an accepted load, and looks at what comes."""
    assert load.label
    assert load.describe()
    if isinstance(load, Sessions):
        load = dataclasses.replace(load, num_sessions=min(load.num_sessions, 20))
    elif isinstance(load, Workload):
        load = dataclasses.replace(load, num_prompts=min(load.num_prompts, FEW))
    prompts, outputs = load.lengths()
    assert len(prompts) == len(outputs) == load.num_prompts
    assert prompts.min() >= 1
    assert outputs.min() >= 1
    for times in (load.arrival_times(), load.think_times()):
        assert times is None or (np.isfinite(times).all() and times.min() >= 0)
    times = load.arrival_times()
    assert times is None or (np.diff(times) >= 0).all()


def play(profile: Profile, load: Load) -> None:
    """Plays a few requests of a load and looks at the numbers."""
    if isinstance(load, Workload):
        load = dataclasses.replace(load, num_prompts=min(load.num_prompts, 2))
    elif isinstance(load, Trace):
        load = load.first(2)
    else:
        return
    _, longest = load.longest()
    if longest <= 20_000:
        run = predict(profile, [load])
        look(summarize(run.levels[0]))


def look(summary: Summary) -> None:
    """The numbers of a simulated level: all of them are there."""
    for name, value in summary.flat().items():
        single = name.endswith(("tpot", "itl")) or name.startswith("steady")
        assert value is None or single or math.isfinite(value), f"{name} is {value}"


# --- documents


def read_scenario(path: Path) -> None:
    scenario = Scenario.read(path)
    profile = scenario.load_profile(SHIPPED)
    server = scenario.servers(profile)[0]
    loads = [scenario.searched_load()] if scenario.load.capacity else scenario.workloads()
    for load in loads[:3]:
        draw(load)
    if server.fleet.engines == 1:
        play(server.profile, loads[0])


def scenario_seeds() -> list[bytes]:
    (scratch() / "profiles").mkdir(exist_ok=True)
    (scratch() / "profiles" / "rtx4090-qwen2.5-7b.yaml").write_bytes((SHIPPED / "rtx4090-qwen2.5-7b.yaml").read_bytes())
    (scratch() / "traces").mkdir(exist_ok=True)
    (scratch() / "traces" / "one-long-request.csv").write_text(
        "TIMESTAMP,ContextTokens,GeneratedTokens\n"
        "2026-01-01 00:00:00.1,512,128\n2026-01-01 00:00:01,300,20\n2026-01-01 00:00:02,64,7\n"
    )
    shown = [path.read_bytes() for path in sorted(SCENARIOS.glob("*.yaml"))]
    return [_without_comments(content) for content in shown] + [
        b"name: a\nprofile: rtx4090-qwen2.5-7b\ngpu: L40S\nreplicas: 2\nrouter: session-sticky\nload:\n"
        b"  request_rate: [0.5, 1]\n  burstiness: .inf\n  input_len: {low: 5, high: 20}\n  output_len: "
        b"lognormal(50,20)\n  duration: 10min\n  max_concurrency: 4\n",
        b"name: b\nprofile: rtx4090-qwen2.5-7b\nengine_flags: {max-num-seqs: 16, kv-cache-memory: 2GiB}\nload:\n"
        b"  concurrency: [1, 4]\n  think_time: 2s\n  input_len: 512\n  output_len: 64\n  range_ratio: 0.1\n"
        b"  num_prompts: 50\n  seed: 3\nslo: {p99_ttft: 2000, error_rate: 0.01}\n",
        b"name: c\nprofile: rtx4090-qwen2.5-7b\nload:\n  request_rate: [2]\n  rate_curve: daily(3h:0.1,12h:1)\n"
        b"  sessions: {turns: {low: 2, high: 5}, user: 100, output: 50, system: 20, max_context: 4000}\n"
        b"  num_prompts: 40\n",
        b"name: d\nprofile: rtx4090-qwen2.5-7b\nload:\n  trace: traces/one-long-request.csv\n  speed: 2\n",
    ]


def _without_comments(content: bytes) -> bytes:
    return b"".join(line for line in content.splitlines(keepends=True) if not line.startswith(b"#"))


def read_profile(path: Path) -> None:
    profile = Profile.load(path)
    again = path.with_name("again.yaml")
    profile.save(again)
    assert Profile.load(again) == profile
    play(profile, Workload(ClosedLoop(2), (Shape(Length.fixed(64), Length.fixed(4)),), 2))


def profile_seeds() -> list[bytes]:
    shown = (SHIPPED / "rtx4090-qwen2.5-7b.yaml").read_bytes()
    more = PROFILE.replace("  host_time:", "  correlations: [[constant, per_sequence, -0.5]]\n  host_time:")
    return [PROFILE.encode(), shown, more.encode()]


def read_config(path: Path) -> None:
    model = read_model(path)
    for ranks in (1, model.attention_heads):
        numbers = [
            model.weight_bytes(ranks),
            model.weight_bytes_read(ranks),
            kv_layout(model, 16, "auto", ranks).bytes_per_token,
        ]
        assert all(math.isfinite(number) and number > 0 for number in numbers), numbers
    assert model.active_parameters > 0
    assert model.layers > 0


def config_seeds() -> list[bytes]:
    llama: dict[str, Any] = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 4096, "num_attention_heads": 32,
        "num_hidden_layers": 32, "num_key_value_heads": 8, "vocab_size": 128256, "intermediate_size": 14336,
        "max_position_embeddings": 131072, "tie_word_embeddings": False, "torch_dtype": "bfloat16",
    }  # fmt: skip
    windows = ["sliding_attention", "full_attention"] * 2
    moe = {
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 256,
        "decoder_sparse_step": 2,
        "mlp_only_layers": [1],
    }
    latent = {
        "kv_lora_rank": 512, "qk_rope_head_dim": 64, "qk_nope_head_dim": 128, "v_head_dim": 128, "q_lora_rank": 1536,
        "n_routed_experts": 8, "n_shared_experts": 1, "num_experts_per_tok": 2, "moe_intermediate_size": 512,
        "first_k_dense_replace": 1,
    }  # fmt: skip
    groups = {"group_0": {"weights": {"num_bits": 4, "group_size": 128, "type": "int"}}}
    configs = [
        llama,
        llama
        | {
            "model_type": "qwen3",
            "head_dim": 128,
            "sliding_window": 4096,
            "num_hidden_layers": 4,
            "layer_types": windows,
        },
        llama | {"model_type": "gemma2", "sliding_window": 4096},
        llama | {"model_type": "qwen3_moe"} | moe,
        llama | {"model_type": "mixtral", "num_local_experts": 8, "num_experts_per_tok": 2, "sliding_window": None},
        llama | {"model_type": "deepseek_v3", "num_key_value_heads": 32} | latent,
        llama | {"quantization_config": {"quant_method": "awq", "bits": 4, "group_size": 128}},
        llama | {"quantization_config": {"quant_method": "compressed-tensors", "config_groups": groups}},
        llama | {"quantization_config": {"quant_method": "modelopt", "quant_algo": "NVFP4"}},
        {"model_type": "llava", "text_config": llama, "quantization_config": {"quant_method": "fp8"}},
    ]
    return [json.dumps(config, indent=1).encode() for config in configs]


# --- what is typed


def read_serve_line(text: str) -> None:
    line = read_line(text)
    assert line.label
    alternative(shipped(), line)


LINES = (
    "vllm serve Qwen/Qwen2.5-7B --max-num-seqs 64 --gpu-memory-utilization=0.85 --enable-prefix-caching",
    "$ VLLM_USE_V1=1 CUDA_VISIBLE_DEVICES=0 python -m vllm.entrypoints.openai.api_server --model Qwen/Qwen2.5-7B \\\n"
    "    --max-num-batched-tokens 4096 --api-key SECRET",
    "docker run --rm --gpus all -p 8000:8000 -e HF_TOKEN=SECRET vllm/vllm-openai:latest --model Qwen/Qwen2.5-7B "
    "--max-model-len 8k --port 8000",
    "name=two --replicas 2 --router least-kv --gpu L40S",
    "--kv-cache-memory-bytes 4.64GiB --long-prefill-token-threshold 512 --block-size 32",
    "--num-gpu-blocks-override 4000 --no-enable-chunked-prefill --max-num-batched-tokens 32768 --max-model-len 32768",
    "--tensor-parallel-size 2 --kv-cache-dtype fp8",
    "--data-parallel-size 2 --scheduling-policy priority --no-async-scheduling",
    "--gpu H100-SXM --tensor-parallel-size 4 --uvicorn-log-level warning",
)


def read_serve_lines(text: str) -> None:
    for line in read_lines(text):
        assert line.label


def read_flags(text: str) -> None:
    """Lines of NAME=VALUE, as the engine flags of a command are given."""
    given = dict(line.partition("=")[::2] for line in text.splitlines())
    changed = change_flags(demo().engine_flags, given, demo().kv_bytes_per_token)
    profile = demo().model_copy(update={"engine_flags": changed})
    play(profile, Workload(ClosedLoop(1), (Shape(Length.fixed(64), Length.fixed(4)),), 2))


def read_shapes(text: str) -> None:
    shapes = request_shapes(None, None, 0.0, text)
    draw(Workload(ClosedLoop(1), tuple(shapes), 20))


def read_length(text: str) -> None:
    length = parsed("a length", text, parse_length)
    assert length is not None
    assert length.low - 0.5 <= length.mean <= length.high + 0.5
    assert ((tokens := length.draw(np.random.default_rng(0), 20)) >= length.low).all()
    assert (tokens <= length.high).all()
    again = parse_length(str(length))
    assert (again.low, again.high) == (length.low, length.high)


def read_sessions(text: str) -> None:
    talk = parsed("--sessions", text, parse_talk)
    assert talk is not None
    draw(Sessions(OpenLoop(1.0), talk, 3))


def read_times(text: str) -> None:
    """A time, a think time or a rate curve by the first word."""
    kind, _, rest = text.partition(" ")
    if kind == "think":
        draw(
            Workload(
                ClosedLoop(2, think_time=parsed("--think-time", rest, parse_think_time)),
                (Shape(Length.fixed(1), Length.fixed(1)),),
                5,
            )
        )
    elif kind == "curve":
        draw(
            Workload(
                OpenLoop(2.0, curve=parsed("--rate-curve", rest, parse_curve)),
                (Shape(Length.fixed(1), Length.fixed(1)),),
                50,
            )
        )
    elif kind == "limit":
        assert 0 < seconds_of("--time-limit", rest) < math.inf
    else:
        assert 0 <= (parsed("--duration", text, parse_seconds) or 0.0) < math.inf


def read_targets(text: str) -> None:
    for name, target in join_targets(text.splitlines()).items():
        assert math.isfinite(target), name


def read_space(text: str) -> None:
    """Lines as they follow --vary, --replicas and --price."""
    for line in text.splitlines():
        option, _, value = line.partition(" ")
        if option == "replicas":
            assert min(parse_counts("--replicas", value)) >= 1
        elif option == "price":
            assert all(0 <= price < math.inf for price in parse_prices([value]).values())
        else:
            parse_vary([line])


def read_names(text: str) -> None:
    """The name of a GPU, a model or a router by the first word."""
    kind, _, name = text.partition(" ")
    {"gpu": find_gpu, "model": find_model}.get(kind, make_router)(name)


def read_options(text: str) -> None:
    """Options of a load and engine flags, as `capsim predict` has them."""
    try:
        arguments = shlex.split(text)
    except ValueError as problem:
        raise typer.BadParameter(" ".join(str(problem).split())) from None
    if not {"--help", "-h", "--trace"} & {argument.partition("=")[0] for argument in arguments}:
        _load_command()(arguments, standalone_mode=False)


@cache
def _load_command() -> Any:
    @with_load("1")
    @with_engine_flags
    def command(loads: list[Load], flags: dict[str, Any]) -> None:
        change_flags(demo().engine_flags, flags, demo().kv_bytes_per_token)
        for load in loads[:3]:
            draw(load)

    app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
    app.command()(command)
    return typer.main.get_command(app)


# --- what capsim wrote


@cache
def predicted_folder() -> Path:
    """A saved run of one level."""
    return _saved([_level()], "predicted")


@cache
def measured_folder() -> Path:
    """A saved run whose only level has every table."""
    level = _level()
    rows = range(4)
    level.tokens = pd.DataFrame(
        [(row, 0.1 * part, part) for row in rows for part in (1, 2, 3)], columns=[*TOKEN_COLUMNS]
    )
    records = [(row, 0.0, 0.001, 0.01, 0.5, 50, 5, 50, -1, "") for row in rows]
    level.records = pd.DataFrame(records, columns=[*RECORD_COLUMNS])
    return _saved([level], "measured")


def _level() -> Level:
    level = predict(demo(), [Workload(ClosedLoop(2), (Shape(Length(40, 60), Length(3, 6)),), 4)]).levels[0]
    level.notes, level.cached_tokens = ["a note"], 3
    level.server_means, level.intervals = {"ttft": 0.1}, {"p50_ttft": (0.1, 0.2)}
    return level


@cache
def recorded_folder() -> Path:
    """A saved run of a trace."""
    times = np.array([0.0, 0.5, 1.0])
    trace = Trace("recorded", times, np.array([40, 50, 60]), np.array([3, 4, 5]))
    return _saved(predict(demo(), [trace]).levels, "recorded")


def _saved(levels: Sequence[Level], name: str) -> Path:
    folder = Path(tempfile.mkdtemp(dir=scratch())) / name
    save_run(Run("simulated", list(levels), predict(demo(), [levels[0].workload]).server), folder)
    return folder


def of_run(folder: Callable[[], Path], name: str) -> tuple[Callable[[], list[bytes]], Callable[[bytes], object]]:
    """Seeds and reader of one file of a run whose others are in order."""

    @cache
    def whole() -> bytes:
        return (folder() / name).read_bytes()

    def read(content: bytes) -> None:
        kept = whole()
        (folder() / name).write_bytes(content)
        try:
            for level in load_run(folder()).levels:
                summarize(level).flat()
                draw(level.workload)
            if name == "run.json":
                replay_of(str(folder()), None, {})
        finally:
            (folder() / name).write_bytes(kept)

    return lambda: [whole(), *_more(name)], read


def _more(name: str) -> list[bytes]:
    """Other contents of the file than those of the folder."""
    if not name.endswith("level.json"):
        return []
    arrivals = [
        {"kind": "open", "request_rate": 2.0, "burstiness": "inf", "max_concurrency": 3},
        {"kind": "open", "request_rate": 2.0, "burstiness": 1.0,
         "curve": {"text": "ramp", "seconds": [0, 10], "factors": [0.1, 1], "period": None}},
        {"kind": "closed", "concurrency": 2, "think_time": {"kind": "exponential", "mean": 2.0}},
    ]  # fmt: skip
    lengths = {"bounds": [1, 50], "kind": "lognormal", "mean": 20.0, "std": 5.0}
    histogram = {"bounds": [1, 50], "kind": "histogram", "ranges": [[1, 10, 0.5], [20, 50, 1]]}
    shapes = [{"input_len": lengths, "output_len": histogram, "weight": 1.0}]
    loads: list[dict[str, Any]] = [{"arrivals": one, "shapes": shapes, "num_prompts": 4, "seed": 1} for one in arrivals]
    talk = {"turns": [2, 3], "user": [10, 20], "output": [5, 5], "system": 7, "max_context": None}
    loads.append({"kind": "sessions", "arrivals": arrivals[2], "talk": talk, "num_sessions": 2, "seed": 0,
                  "think_time": {"kind": "fixed", "mean": 1.0}})  # fmt: skip
    return [
        json.dumps({"workload": load, "duration": 2.5, "notes": ["a note"], "server_means": {}}, indent=1).encode()
        for load in loads
    ]


RUN_ERRORS = (RunFileError, TraceError, LoadError, FlagError)
PREDICTED = (
    "run.json",
    "levels/000/level.json",
    *(f"levels/000/{name}.csv" for name in ("requests", "gaps", "timeline")),
)
MEASURED = ("levels/000/tokens.csv", "levels/000/records.csv")


def run_reader(name: str, folder: Callable[[], Path], file: str) -> Reader:
    seeds, read = of_run(folder, file)
    return Reader(name, seeds, read, (*RUN_ERRORS, CommandError), slow=True)


def read_search_log(path: Path) -> None:
    with SearchLog(path) as log:
        for key in ("a1", "b2", "c3"):
            if (result := log.get(key)) is not None and "refused" not in result:
                figures_of(result["numbers"])
                assert math.isfinite(result["growth"] or 0.0)
                assert result["figures"] is not None
                assert result["peak"] >= 0
        log.add("another", {"refused": "too long"})
    with SearchLog(path) as log:
        assert log.get("another") is not None


def search_log_seeds() -> list[bytes]:
    numbers = summarize(
        predict(demo(), [Workload(ClosedLoop(1), (Shape(Length.fixed(20), Length.fixed(3)),), 2)]).levels[0]
    ).flat()
    result = {"numbers": numbers, "figures": figures_of(numbers), "growth": None, "peak": 2}
    return [b"".join(json.dumps({"key": key, "result": result}).encode() + b"\n" for key in ("a1", "b2", "c3")), b""]


LOADS = (LoadError, TraceError)
SERVERS = (FlagError, MemoryAccountError, ModelError, GpuError, RouterError)

READERS: tuple[Reader, ...] = (
    Reader(
        "scenario",
        scenario_seeds,
        of_file("scenario.yaml", read_scenario),
        (DocumentError, CannotFit, OSError, *LOADS),
        slow=True,
    ),
    Reader("profile", profile_seeds, of_file("profile.yaml", read_profile), (ProfileError, CannotFit), slow=True),
    Reader("model config", config_seeds, of_file("config.json", read_config), (ModelError,)),
    Reader("serve line", texts(*LINES), of_text(read_serve_line), SERVERS),
    Reader("serve lines", texts("\n".join(LINES)), of_text(read_serve_lines), (FlagError,)),
    Reader(
        "engine flags",
        texts("--max-num-seqs=16\n--block-size=32\nkv-cache-memory=1GiB", "watermark=0.1\nmax_model_len=4k"),
        of_text(read_flags),
        (FlagError, CannotFit),
    ),
    Reader(
        "shapes",
        texts("512/128:0.7,4096/256:0.3", "lognormal(500,300)/exponential(200),512-1024/64~0.1:2",
              "normal(500,100,64-2048)/9"),
        of_text(read_shapes),
        (USAGE,),
    ),
    Reader(
        "lengths",
        texts("512", "512-1024", "512~0.1", "lognormal(500,300)", "normal(500,100,64-2048)", "exponential(200)",
              "histogram(1-99:3,100:1)"),
        of_text(read_length),
        (USAGE,),
    ),
    Reader(
        "sessions",
        texts("turns=3-8,user=50-200,output=200,system=1000",
              "turns=lognormal(4,2),user=10,output=20,max-context=4000"),
        of_text(read_sessions),
        (USAGE,),
    ),
    Reader(
        "times",
        texts("2s", "500ms", "1.5h", "think exponential(2s)", "think 3", "limit 5m", "curve ramp(0.1-1,10min)",
              "curve bursts(5s,20s,0.2)", "curve daily(0h:0.2,9h:1,18h:0.4)"),
        of_text(read_times),
        (USAGE,),
    ),
    Reader(
        "targets",
        texts("p99_ttft:2000,p99_itl:100", "mean_tpot:30\nerror_rate:0.01"),
        of_text(read_targets),
        (KeyProblem,),
    ),
    Reader(
        "search space",
        texts("--max-num-seqs=64,128\n--max-num-batched-tokens=512..8192:log2",
              "replicas 1..8\nprice L4=0.5/h,H100-SXM=2.5",
              "--enable-prefix-caching true,false\nblock-size=16..128:+16"),
        of_text(read_space),
        (SpaceError, FlagError),
    ),
    Reader(
        "names",
        texts("gpu NVIDIA GeForce RTX 4090", "gpu H100-SXM", "model Qwen/Qwen2.5-7B-Instruct-AWQ",
              "model llama-3.1-8b-fp8",
              "router least-kv"),
        of_text(read_names),
        (GpuError, ModelError, RouterError, OSError),
    ),
    Reader(
        "load options",
        texts("--concurrency 1,2,4 --input-len 64 --output-len 8 --think-time 'exponential(2s)' --num-prompts 50",
              "--request-rate 0.5,2 --burstiness 0.5 --shapes 512/128:0.7,64/9 --duration 1min --max-in-flight 4",
              "--request-rate 1 --sessions turns=2-3,user=50,output=20 --rate-curve 'bursts(5s,20s)' --seed 7",
              "--concurrency 4 --range-ratio 0.2 --max-num-seqs 64 --no-enable-chunked-prefill "
              "--max-num-batched-tokens 16k"),
        of_text(read_options),
        (USAGE, FlagError, *LOADS),
    ),
    *(run_reader(f"run {Path(file).name}", predicted_folder, file) for file in PREDICTED),
    *(run_reader(f"run {Path(file).name}", measured_folder, file) for file in MEASURED),
    run_reader("run load.csv", recorded_folder, "levels/000/load.csv"),
    Reader("search log", search_log_seeds, of_file("log.jsonl", read_search_log), (SearchLogError,)),
)  # fmt: skip
