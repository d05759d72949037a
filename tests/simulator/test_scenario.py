"""A scenario becomes levels of load and engine flags, or one line that says what is wrong with it."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest

from simulator.loads.arrivals import ThinkTime, parse_curve
from simulator.loads.lengths import parse_length
from simulator.loads.levels import LoadError, parse_shape, plan_levels
from simulator.loads.sessions import Sessions, Talk
from simulator.loads.trace import Trace, TraceError
from simulator.loads.workload import ClosedLoop, Length, Load, OpenLoop, Shape, Workload
from simulator.profile import Profile
from simulator.scenario import Scenario, ScenarioError

SCENARIO = """\
name: demo
profile: demo.yaml
engine_flags:
  max-num-seqs: 16
  kv-cache-memory: 1GiB
load:
  concurrency: [1, 4]
  input_len: 512
  output_len: 64
  num_prompts: 50
  seed: 3
slo:
  p99_ttft: 2000
"""
FIXED = Shape(Length.fixed(512), Length.fixed(64))


@pytest.fixture
def scenario_file(tmp_path: Path) -> Path:
    path = tmp_path / "scenario.yaml"
    path.write_text(SCENARIO)
    return path


def changed(path: Path, old: str, new: str) -> Path:
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new, 1))
    return path


def test_states_levels_flags_and_targets(scenario_file: Path, profile: Profile) -> None:
    scenario = Scenario.read(scenario_file)
    assert scenario.workloads() == [Workload(ClosedLoop(1), (FIXED,), 50, 3), Workload(ClosedLoop(4), (FIXED,), 50, 3)]
    (server,) = scenario.servers(scenario.load_profile())
    flags = server.flags
    assert (flags.max_num_seqs, flags.num_gpu_blocks) == (16, 1024)
    assert flags.max_num_batched_tokens == profile.engine_flags.max_num_batched_tokens
    assert scenario.slo == {"p99_ttft": 2000}


@pytest.mark.parametrize(
    ("load", "expected"),
    [
        ("concurrency: [2]\n  requests_per_client: 5", [Workload(ClosedLoop(2), (FIXED,), 10)]),
        (
            "request_rate: [0.5, .inf]",
            [Workload(OpenLoop(0.5), (FIXED,), 1000), Workload(OpenLoop(math.inf), (FIXED,), 1000)],
        ),
        ("request_rate: [2]\n  burstiness: .inf\n  num_prompts: 9", [Workload(OpenLoop(2, math.inf), (FIXED,), 9)]),
    ],
)
def test_reads_every_kind_of_arrival(scenario_file: Path, load: str, expected: list[Workload]) -> None:
    changed(scenario_file, "concurrency: [1, 4]", load)
    changed(scenario_file, "  num_prompts: 50\n  seed: 3\n", "")
    assert Scenario.read(scenario_file).workloads() == expected


@pytest.mark.parametrize(
    ("lengths", "shapes"),
    [
        ("input_len: {low: 10, high: 20}\n  output_len: 5", (Shape(Length(10, 20), Length.fixed(5)),)),
        ("input_len: 100\n  output_len: 10\n  range_ratio: 0.5", (Shape(Length(50, 150), Length(5, 15)),)),
        (
            'shapes: ["512/128:0.7", 4096-8192/256:0.3]',
            (
                Shape(Length.fixed(512), Length.fixed(128), 0.7),
                Shape(Length(4096, 8192), Length.fixed(256), 0.3),
            ),
        ),
    ],
)
def test_reads_every_kind_of_length(scenario_file: Path, lengths: str, shapes: tuple[Shape, ...]) -> None:
    changed(scenario_file, "input_len: 512\n  output_len: 64", lengths)
    assert Scenario.read(scenario_file).workloads()[0].shapes == shapes


@pytest.mark.parametrize(
    ("load", "expected"),
    [
        (
            "concurrency: [2]\n  think_time: exponential(2s)\n"
            "  input_len: lognormal(500,300,1-900)\n  output_len: 5~0.2",
            Workload(
                ClosedLoop(2, think_time=ThinkTime(2.0, "exponential")),
                (Shape(parse_length("lognormal(500,300,1-900)"), Length(4, 6)),),
                1000,
            ),
        ),
        (
            "request_rate: [2]\n  rate_curve: bursts(5s,20s)\n  max_concurrency: 8\n  duration: 100\n  shapes: [9/5]",
            Workload(
                OpenLoop(2.0, curve=parse_curve("bursts(5s,20s)"), max_concurrency=8),
                (Shape(Length.fixed(9), Length.fixed(5)),),
                40,
            ),
        ),
        (
            "concurrency: [3]\n  think_time: 1.5\n  num_prompts: 12\n"
            "  sessions: {turns: 4, user: {low: 10, high: 20}, output: 30, system: 100}",
            Sessions(
                ClosedLoop(3, think_time=ThinkTime(1.5)),
                Talk(Length.fixed(4), Length(10, 20), Length.fixed(30), 100),
                3,
                ThinkTime(1.5),
            ),
        ),
        (
            "trace: day.csv\n  speed: 2\n  num_prompts: 2",
            Trace("day", np.array([0.0, 0.5]), np.array([7, 8]), np.array([1, 2])),
        ),
    ],
)
def test_reads_every_kind_of_load(scenario_file: Path, load: str, expected: Load) -> None:
    (scenario_file.parent / "day.csv").write_text("timestamp,input_length,output_length\n5,7,1\n6,8,2\n7,9,3\n")
    before = SCENARIO[SCENARIO.index("  concurrency") : SCENARIO.index("slo:")]
    assert Scenario.read(changed(scenario_file, before, f"  {load}\n")).workloads() == [expected]


def test_a_trace_that_is_not_there_is_told(scenario_file: Path) -> None:
    scenario = Scenario.read(
        changed(scenario_file, "input_len: 512\n  output_len: 64", "trace: none.csv\n  trace_format: azure")
    )
    with pytest.raises(TraceError, match=r"none\.csv: no such file"):
        scenario.workloads()


@pytest.mark.parametrize(
    ("old", "new", "line", "words"),
    [
        ("concurrency: [1, 4]", "concurrency: [0]", 7, "load: concurrency must be at least 1, got 0"),
        ("concurrency: [1, 4]", "concurrency: []", 6, "the list of levels is empty"),
        ("concurrency: [1, 4]", "concurrency: 4", 7, "concurrency must be a list in [ ]"),
        ("concurrency: [1, 4]", "concurrency: [1, 4]\n  request_rate: [1]", 7, "either concurrency or request_rate"),
        ("concurrency: [1, 4]", "request_rate: [.nan]", 7, "request_rate[0] must be greater than 0"),
        ("input_len: 512", "input_len: 1k tokens", 8, "input_len: must be a whole number of tokens"),
        ("input_len: 512", "input_len: {low: 5, hihg: 6}", 8, "input_len.hihg: a length has the keys low and high"),
        ("input_len: 512", "input_len: {low: 5}", 8, "a length needs both low and high"),
        ("  input_len: 512\n", "", 8, "give input_len and output_len, or shapes"),
        ("input_len: 512", 'shapes: ["512/128"]', 8, "give either shapes, or input_len, output_len and range_ratio"),
        ("num_prompts: 50", "num_prompts: 0", 10, "num_prompts must be greater than or equal to 1 (requests a level)"),
        (
            "num_prompts: 50",
            "num_prompts: 50\n  requests_per_client: 3",
            11,
            "requests_per_client goes with concurrency",
        ),
        ("input_len: 512", "input_len: zipf(2)", 8, "'zipf' is no distribution; known are normal"),
        ("  seed: 3", "  think_time: a while", 11, "load.think_time: 'a while' is no time such as 2s"),
        ("  seed: 3", "  rate_curve: wave(1)", 11, "no rate curve; write one as ramp(0.1-1,10min)"),
        ("  seed: 3", "  speed: 2", 11, "speed goes with a trace"),
        ("  seed: 3", "  trace: x.csv", 11, "give either lengths, or sessions, or a trace"),
        (
            "  seed: 3",
            "  sessions: {turns: 3, user: 5}",
            11,
            "key load.sessions.output is missing: it is tokens to generate",
        ),
        ("  seed: 3", "  trace_format: azure", 11, "trace_format goes with a trace"),
        ("p99_ttft: 2000", "p99_tft: 2000", 13, "slo.p99_tft: not a latency with a target; did you mean 'p99_ttft'?"),
        ("p99_ttft: 2000", "p99_ttft: 2 s", 13, "slo.p99_ttft must be a number (milliseconds), got '2 s'; write 2000"),
        ("p99_ttft: 2000", "p99_ttft: -2", 13, "a target must be a positive number of milliseconds"),
        ("max-num-seqs: 16", "max-num-sequences: 16", 4, "did you mean 'max-num-seqs'?"),
        ("max-num-seqs: 16", "max-num-seqs: 16\n  max_num_seqs: 8", 5, "given twice under two names"),
        ("load:", "gpu: H1000\nload:", 6, "gpu: "),
        ("load:", "replicas: 0\nload:", 6, "replicas must be greater than or equal to 1 (servers behind a router)"),
        ("load:", "router: fastest\nload:", 6, "router: "),
        ("load:", "router: p/d\nload:", 6, "prefill/decode disaggregation is not modelled"),
        (
            "load:",
            "alternatives:\n- --max-num-seqs 4\n- --max-seqs 8\nload:",
            8,
            "alternatives[1]: vLLM has no flag --max-seqs",
        ),
        (
            "load:",
            "alternatives: --max-num-seqs 4\nload:",
            6,
            "alternatives must be a list in [ ] (lines of flags that differ",
        ),
        (
            "concurrency: [1, 4]",
            "concurrency: [1, 4]\n  capacity: clients",
            8,
            "give either capacity, which searches for the level, or concurrency",
        ),
        ("concurrency: [1, 4]", "capacity: users", 7, "load.capacity must be 'clients' or 'rate', got 'users'"),
        ("load:", "lod:", 6, "unknown key lod; did you mean 'load'?"),
        ("profile: demo.yaml", "profile: 7", 2, "profile must be text in quotes"),
    ],
)
def test_a_fault_is_told_with_its_line(scenario_file: Path, old: str, new: str, line: int, words: str) -> None:
    with pytest.raises(ScenarioError) as caught:
        Scenario.read(changed(scenario_file, old, new))
    assert str(caught.value).startswith(f"{scenario_file}, line {line}: ")
    assert words in str(caught.value)


def test_finds_its_profile_beside_it_or_among_the_shipped(
    scenario_file: Path, profile_file: Path, tmp_path: Path
) -> None:
    shipped = tmp_path / "shipped"
    shipped.mkdir()
    profile_file.rename(shipped / "gpu.yaml")
    assert Scenario.read(changed(scenario_file, "demo.yaml", "shipped/gpu.yaml")).load_profile().name == "demo"
    assert Scenario.read(changed(scenario_file, "shipped/gpu.yaml", "gpu")).load_profile(shipped).name == "demo"
    with pytest.raises(ScenarioError, match=r"there is no .*other.*; shipped are gpu"):
        Scenario.read(changed(scenario_file, "profile: gpu", "profile: other")).load_profile(shipped)


def test_flags_that_contradict_each_other_are_told(scenario_file: Path, profile: Profile) -> None:
    scenario = Scenario.read(changed(scenario_file, "max-num-seqs: 16", "max-num-seqs: 4096"))
    with pytest.raises(ScenarioError, match="engine_flags: --max-num-batched-tokens"):
        scenario.servers(profile)


def test_one_level_is_planned_for_each_number() -> None:
    levels = plan_levels([FIXED], concurrency=[1, 2], seed=7)
    assert [str(level.arrivals) for level in levels] == ["C=1", "C=2"]
    assert {level.num_prompts for level in levels} == {1000}
    with pytest.raises(LoadError, match="request rate must be positive"):
        plan_levels([FIXED], request_rate=[0.0])


@pytest.mark.parametrize(
    "text", ["", "512", "512/", "/5", "a/b", "0/5", "9-5/1", "5/5:0", "5/5:nan", "5/5:-1", "5.5/1"]
)
def test_what_is_no_shape_is_refused(text: str) -> None:
    with pytest.raises(LoadError, match="is not a shape such as"):
        parse_shape(text)


# --- several servers, and a level that is searched for


def added(path: Path, sections: str) -> Scenario:
    return Scenario.read(changed(path, "load:", f"{sections}\nload:"))


def test_alternatives_differ_from_the_server_in_question(scenario_file: Path, profile: Profile) -> None:
    scenario = added(scenario_file, "alternatives:\n- --max-num-seqs 8\n- name=pool --num-gpu-blocks-override 600")
    own, fewer, pool = scenario.servers(profile)
    assert [server.name for server in (own, fewer, pool)] == [
        "--max-num-seqs 16 --kv-cache-memory-bytes 1073741824",
        "--max-num-seqs 8",
        "pool",
    ]
    assert [server.flags.max_num_seqs for server in (own, fewer, pool)] == [16, 8, 16]
    # the last word on the pool counts
    assert [server.flags.num_gpu_blocks for server in (own, fewer, pool)] == [1024, 1024, 600]


def test_flags_given_besides_hold_for_all_but_what_an_alternative_changes(
    scenario_file: Path, profile: Profile
) -> None:
    scenario = added(scenario_file, "alternatives: [--max-num-seqs 8, --block-size 32]")
    own, fewer, blocks = scenario.servers(profile, {"--max-num-seqs": "12", "--enable-prefix-caching": True})
    assert [server.flags.max_num_seqs for server in (own, fewer, blocks)] == [12, 8, 12]
    assert all(server.flags.enable_prefix_caching for server in (own, fewer, blocks))


def test_a_fleet_and_another_gpu_are_part_of_the_question(scenario_file: Path, profile: Profile) -> None:
    measured = profile.model_copy(update={"gpu": "A100-SXM4-80GB", "model": "Qwen/Qwen2.5-7B"})
    sections = "gpu: H100-SXM\nreplicas: 3\nrouter: least-kv\nalternatives: [--replicas 2]"
    own, fewer = added(scenario_file, sections).servers(measured)
    assert (own.fleet.replicas, own.fleet.router) == (3, "least-kv")
    assert (fewer.fleet.replicas, fewer.fleet.router) == (2, "least-kv")
    assert own.profile.gpu == fewer.profile.gpu == "H100 SXM"
    assert own.profile.step_time.constant < profile.step_time.constant


def test_flags_of_memory_and_ranks_are_flags_too(scenario_file: Path, profile: Profile) -> None:
    changed(scenario_file, "  kv-cache-memory: 1GiB\n", "  data-parallel-size: 2\n")
    (server,) = Scenario.read(scenario_file).servers(profile)
    assert server.fleet.engines == 2


def test_what_is_not_modelled_is_told_with_its_place(scenario_file: Path, profile: Profile) -> None:
    scenario = added(scenario_file, "alternatives: [--max-num-seqs 8, --enable-lora]")
    with pytest.raises(ScenarioError, match=r"alternatives\[1\]: --enable-lora would change the result"):
        scenario.servers(profile)


@pytest.mark.parametrize(("by", "arrivals"), [("clients", ClosedLoop(1)), ("rate", OpenLoop(1.0))])
def test_a_capacity_is_searched_for_and_has_no_levels(
    scenario_file: Path, profile: Profile, by: str, arrivals: ClosedLoop | OpenLoop
) -> None:
    scenario = Scenario.read(changed(scenario_file, "concurrency: [1, 4]", f"capacity: {by}"))
    assert scenario.searched_load() == Workload(arrivals, (FIXED,), 50, 3)
    with pytest.raises(ScenarioError, match="searches for a level by capacity and states none"):
        scenario.workloads()
    with pytest.raises(ScenarioError, match=r"line 6: load: capacity is the highest level that meets slo; give slo"):
        Scenario.read(changed(changed(scenario_file, "slo:\n", ""), "  p99_ttft: 2000\n", ""))
    scenario_file.write_text(scenario_file.read_text() + "slo: {p99_ttft: 2000}\n")
    with pytest.raises(ScenarioError, match="capacity is searched for one engine"):
        added(scenario_file, "replicas: 2").servers(profile)
