"""Routers choose as they say, whatever the replicas look like."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st

from simulator.engine.request import Request
from simulator.engine.routers import ROUTERS, DataParallelBalancer, RouterError, SessionSticky, make_router


@dataclass
class Seen:
    """A replica as a router sees it."""

    in_flight: int = 0
    kv_tokens: int = 0
    cached: int = 0
    waiting: int = 0
    running: int = 0
    kv_usage: float = 0.0
    got: list[int] = field(default_factory=list)

    def cached_tokens(self, request: Request) -> int:
        return self.cached


REPLICAS = st.lists(
    st.builds(Seen, st.integers(0, 50), st.integers(0, 9000), st.integers(0, 100)), min_size=1, max_size=6
)


def request(number: int = 0) -> Request:
    return Request(number, 100, 10)


@given(st.integers(1, 7), st.integers(1, 60))
def test_round_robin_counts_differ_by_one_at_most(count: int, requests: int) -> None:
    router, replicas = make_router("round-robin"), [Seen() for _ in range(count)]
    chosen = Counter(router.choose(request(number), replicas) for number in range(requests))
    assert max(chosen.values()) - min(chosen[number] for number in range(count)) <= 1


@given(REPLICAS)
def test_least_requests_never_picks_a_busier_one(replicas: list[Seen]) -> None:
    chosen = make_router("least-requests").choose(request(), replicas)
    assert replicas[chosen].in_flight == min(replica.in_flight for replica in replicas)


@given(REPLICAS)
def test_least_kv_picks_who_holds_the_fewest_tokens(replicas: list[Seen]) -> None:
    chosen = make_router("least-kv").choose(request(), replicas)
    assert replicas[chosen].kv_tokens == min(replica.kv_tokens for replica in replicas)


@given(REPLICAS)
def test_no_replica_has_both_a_longer_prefix_and_less_to_do_than_the_prefix_aware_choice(replicas: list[Seen]) -> None:
    chosen = replicas[make_router("prefix-aware").choose(request(), replicas)]
    assert not any(other.cached > chosen.cached and other.in_flight < chosen.in_flight for other in replicas)


def test_a_prefix_is_not_worth_any_queue() -> None:
    router = make_router("prefix-aware")
    assert router.choose(request(), [Seen(in_flight=4, cached=90), Seen(in_flight=4)]) == 0
    assert router.choose(request(), [Seen(in_flight=12, cached=90), Seen(in_flight=2)]) == 1


def test_a_session_stays_where_it_began() -> None:
    replicas = [Seen(), Seen(), Seen()]
    router = SessionSticky([0, 0, 1, 1, 2, 0])
    homes = []
    for number in range(6):
        chosen = router.choose(request(number), replicas)
        replicas[chosen].in_flight += 1
        homes.append(chosen)
    assert homes[0] == homes[1] == homes[5]
    assert homes[2] == homes[3]
    assert len({homes[0], homes[2], homes[4]}) == 3


def test_the_same_seed_routes_alike_and_any_replica_gets_its_share() -> None:
    replicas = [Seen() for _ in range(4)]
    one, same, other = (make_router("random", seed=seed) for seed in (1, 1, 2))
    routes = [[router.choose(request(number), replicas) for number in range(4000)] for router in (one, same, other)]
    assert routes[0] == routes[1] != routes[2]
    assert min(Counter(routes[0]).values()) > 900


def test_vllm_spreads_a_burst_evenly_though_it_has_not_heard_from_its_engines() -> None:
    engines = [Seen() for _ in range(3)]
    balancer = DataParallelBalancer(lambda: 0.0)
    for _ in range(9):
        engines[balancer.choose(engines)].in_flight += 1
    assert [engine.in_flight for engine in engines] == [3, 3, 3]


def test_vllm_avoids_an_engine_whose_requests_wait_for_kv_cache() -> None:
    full, busier = Seen(in_flight=6, running=4, waiting=2, kv_usage=1.0), Seen(in_flight=10, running=10)
    assert DataParallelBalancer(lambda: 0.0).choose([full, busier]) == 1
    full.kv_usage = 0.5  # then they wait for other reasons, which pass
    assert DataParallelBalancer(lambda: 0.0).choose([full, busier]) == 0


@pytest.mark.parametrize("name", ["pd", "prefill-decode", "disaggregated"])
def test_disaggregation_is_refused_by_name(name: str) -> None:
    with pytest.raises(RouterError, match="disaggregation is not modelled"):
        make_router(name)


def test_an_unknown_router_is_refused_with_a_proposal() -> None:
    with pytest.raises(RouterError, match="least-requests"):
        make_router("least-request")
    assert all(make_router(name) for name in ROUTERS)
