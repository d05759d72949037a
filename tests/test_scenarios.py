"""Every shipped scenario runs as it is, and its header's claims hold."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
from typer.testing import CliRunner

from capsim.cli import app
from capsim.shipped import PROFILES, SCENARIOS
from simulator.loads.trace import Trace
from simulator.loads.workload import Load, OpenLoop, Workload
from simulator.planning.alternative import Alternative
from simulator.planning.capacity import CapacitySearch
from simulator.results.run import Level
from simulator.results.summary import summarize
from simulator.scenario import Scenario

NAMES = sorted(path.stem for path in SCENARIOS.glob("*.yaml"))


@cache
def answer(name: str) -> dict[str, Any]:
    """What `capsim simulate` answers, for programs."""
    result = CliRunner().invoke(app, ["simulate", name, "--no-intervals", "--json"])
    assert result.exit_code == 0, result.output
    content: dict[str, Any] = json.loads(result.stdout)
    return content


def outcomes(name: str) -> list[dict[str, dict[str, Any]]]:
    """Of each level, every server's numbers by its name; the one in question is "baseline"."""
    return [
        {"baseline": level["baseline"]} | {outcome["name"]: outcome for outcome in level["alternatives"]}
        for level in answer(name)["levels"]
    ]


def question(name: str) -> tuple[Scenario, Alternative]:
    scenario = Scenario.read(SCENARIOS / f"{name}.yaml")
    return scenario, scenario.servers(scenario.load_profile(PROFILES))[0]


def played(load: Load, server: Alternative) -> Level:
    return server.fleet.simulate(load, server.flags, server.profile.step_time, server.profile.host_time)


def test_there_is_one_for_every_question() -> None:
    assert NAMES == [
        "bursts",
        "chat-shared-prefix",
        "one-long-request",
        "rtx4090-kv-cache-memory",
        "rtx4090-qwen2.5-7b",
        "short-and-long",
        "step-token-budget",
        "which-gpu",
    ]


LONG = ("short-and-long", "which-gpu")  # to simulate, some seconds each


@pytest.mark.parametrize("name", [pytest.param(name, marks=[pytest.mark.slow] * (name in LONG)) for name in NAMES])
def test_runs_and_explains_itself(name: str) -> None:
    assert answer(name)
    text = (SCENARIOS / f"{name}.yaml").read_text()
    header = text[: text.index("\nschema_version:")]
    assert all(line.startswith("#") for line in header.splitlines())
    assert "?" in header
    assert "What the result says:" in header


def test_a_larger_pool_helps_only_where_the_pool_is_full() -> None:
    below, beyond = outcomes("rtx4090-kv-cache-memory")
    assert below["suggested"]["output_throughput"] == below["baseline"]["output_throughput"]
    assert below["baseline"]["peak_kv_tokens"] < 0.95 * below["baseline"]["ceilings"]["kv_tokens"]
    gains = {
        name: beyond[name]["output_throughput"] / beyond["baseline"]["output_throughput"] - 1
        for name in ("suggested", "and-89-slots")
    }
    assert gains["suggested"] == pytest.approx(0.08, abs=0.02)
    assert gains["and-89-slots"] == pytest.approx(0.16, abs=0.02)
    assert beyond["suggested"]["p50_ttft"] < 0.4 * beyond["baseline"]["p50_ttft"]
    assert beyond["suggested"]["preemptions"] > 100
    assert beyond["and-89-slots"]["preemptions"] == 0


def test_a_small_step_token_budget_breaks_the_target_while_the_gpu_idles() -> None:
    few, many = outcomes("step-token-budget")
    small, middle, large = "baseline", "--max-num-batched-tokens 512", "--max-num-batched-tokens 2048"
    assert not any(outcome["missed_targets"] for outcome in few.values())
    assert many[small]["missed_targets"] == ["p95_ttft"]
    assert not many[middle]["missed_targets"]
    assert not many[large]["missed_targets"]
    # neither memory nor slots are used up, and the engine computes more where the budget is larger
    assert many[small]["peak_kv_tokens"] < 0.5 * many[small]["ceilings"]["kv_tokens"]
    assert many[small]["ceilings"]["slots"] == 128
    busy = {name: outcome["limits"]["computing"] for name, outcome in many.items()}
    assert busy[small] < 0.5 < 0.55 < busy[middle] < busy[large]
    assert many[large]["output_throughput"] > 1.3 * many[small]["output_throughput"]
    # and the price: longer gaps where a step computes more of a prompt
    assert many[small]["p99_itl"] < many[middle]["p99_itl"] < 0.5 * many[large]["p99_itl"]


@pytest.mark.slow
def test_a_few_long_requests_take_the_place_of_many_clients_but_not_of_tokens() -> None:
    mixed = answer("short-and-long")["slos"][0]["at_level"]
    scenario, server = question("short-and-long")
    load = scenario.searched_load()
    assert isinstance(load, Workload)
    shorts = replace(load, shapes=load.shapes[:1])
    search = CapacitySearch(shorts, server.flags, server.profile.step_time, server.profile.host_time)
    short = search.find(scenario.slo).best
    assert short is not None
    assert mixed["value"] == pytest.approx(14, abs=2)
    assert short.value == pytest.approx(134, abs=5)
    assert mixed["mean_active_tokens"] == pytest.approx(short.numbers["mean_active_tokens"], rel=0.25)


def test_one_long_request_makes_others_wait_in_two_ways() -> None:
    (servers,) = outcomes("one-long-request")
    for name in ("baseline", "more-memory", "short-chunks"):
        assert servers[name]["missed_targets"] == ["p95_ttft"], name
    for name in ("both", "two-servers"):
        assert not servers[name]["missed_targets"], name
    assert servers["baseline"]["preemptions"] > 0
    assert servers["more-memory"]["preemptions"] == 0

    scenario, server = question("one-long-request")
    (trace,) = scenario.workloads()
    assert isinstance(trace, Trace)
    prompts, outputs = trace.lengths()
    short = prompts < 1000
    assert (~short).sum() == 1
    assert trace.times is not None
    without = Trace(trace.name, trace.times[short], prompts[short], outputs[short])
    ttft = summarize(played(without, server)).flat()["p95_ttft"]
    assert ttft is not None
    assert ttft < 0.15


def test_a_burst_asks_for_more_than_its_mean_rate() -> None:
    (servers,) = outcomes("bursts")
    assert servers["baseline"]["missed_targets"] == ["p95_ttft"]
    assert servers["--max-num-batched-tokens 8192"]["missed_targets"] == ["p95_ttft"]
    assert not servers["two-servers"]["missed_targets"]
    assert servers["baseline"]["request_throughput"] == pytest.approx(2, rel=0.05)

    scenario, server = question("bursts")
    (load,) = scenario.workloads()
    assert isinstance(load, Workload)
    even = summarize(played(replace(load, arrivals=OpenLoop(2.0)), server)).flat()
    assert even["p95_ttft"] is not None
    assert even["p95_ttft"] * 1000 < scenario.slo["p95_ttft"] / 2
    assert even["peak_kv_tokens"] is not None
    assert even["peak_kv_tokens"] < 0.5 * servers["baseline"]["peak_kv_tokens"]


def test_a_chat_gains_from_its_prefixes_where_the_router_keeps_them_together() -> None:
    (servers,) = outcomes("chat-shared-prefix")
    assert servers["baseline"]["missed_targets"] == ["p90_ttft"]
    assert not servers["caching"]["missed_targets"]
    assert servers["caching"]["p50_e2el"] < 0.5 * servers["baseline"]["p50_e2el"]
    assert servers["sticky"]["p50_ttft"] < servers["caching"]["p50_ttft"] < servers["round-robin"]["p50_ttft"]
    assert servers["sticky"]["p50_e2el"] < servers["round-robin"]["p50_e2el"] < servers["caching"]["p50_e2el"]


@pytest.mark.slow
def test_memory_bandwidth_decides_which_gpu_bears_most_clients() -> None:
    servers = {server["name"]: server for server in answer("which-gpu")["servers"]}
    level = {name: server["slos"][0]["level"] for name, server in servers.items()}
    assert level["L40S"] < level["as measured"] < level["RTX-5090"] < level["H100"]
    assert servers["H100"]["times_baseline"] == pytest.approx(level["H100"] / level["as measured"])
    for server in servers.values():
        found = server["slos"][0]
        assert found["beyond"]["missed"] == ["p95_tpot"]
        assert found["at_level"]["peak_kv_tokens"] < 0.6 * server["ceilings"]["kv_tokens"]
    assert all(server["assumed"] for name, server in servers.items() if name != "as measured")
