"""Which server gets which request."""

import random
from collections import Counter

import pytest

from megatron_dppo.engines.sglang.dispatch import LoadBalancer, group_of

URLS = ("a", "b", "c", "d")


def _load_balancer(urls: tuple[str, ...] = URLS, limit: int = 1000) -> LoadBalancer:
    return LoadBalancer(urls, limit, random.Random(0))


def test_requests_of_a_group_go_to_one_server() -> None:
    balancer = _load_balancer()
    homes = {group: {balancer.take(f"g{group}") for _ in range(8)} for group in range(40)}
    assert all(len(urls) == 1 for urls in homes.values())
    assert {url for urls in homes.values() for url in urls} == set(URLS)


def test_two_choices_keep_servers_near_each_other() -> None:
    balancer = _load_balancer()
    taken = Counter(balancer.take(str(group)) for group in range(2000))
    assert max(taken.values()) - min(taken.values()) <= 8


def test_the_less_loaded_of_two_gets_the_request() -> None:
    balancer = _load_balancer(("a", "b"))
    balancer.report("a", 5)
    assert [balancer.take(str(i)) for i in range(5)] == ["b"] * 5
    assert Counter(balancer.take(str(i)) for i in range(5, 15)) == {"a": 5, "b": 5}


def test_a_report_holds_our_own_requests_too() -> None:
    balancer = _load_balancer(("a", "b"))
    first, second = balancer.take("0"), balancer.take("1")
    assert {first, second} == {"a", "b"}
    balancer.report("a", 3)  # ours, and two of somebody else
    assert [balancer.take(str(i)) for i in (2, 3)] == ["b"] * 2
    balancer.give_back("a")
    assert balancer.take("4") == "a"


def test_a_report_from_before_our_requests_came_counts_no_other() -> None:
    balancer = _load_balancer(("a", "b"))
    for group in range(10):
        balancer.take(str(group))
    balancer.report("a", 0)
    assert Counter(balancer.take(str(i)) for i in range(10, 20)) == {"a": 5, "b": 5}


def test_no_server_gets_more_than_its_limit() -> None:
    balancer = _load_balancer(limit=3)
    assert Counter(balancer.take("one group") for _ in range(14)) == {**dict.fromkeys(URLS, 3), None: 2}
    balancer.give_back("c")
    assert [balancer.take("other"), balancer.take("other")] == ["c", None]


def test_a_drained_server_gets_nothing_and_its_groups_move() -> None:
    balancer = _load_balancer()
    home = balancer.take("g")
    assert home is not None
    balancer.drain(home)
    assert home not in balancer.serving
    balancer.give_back(home)
    assert len({balancer.take("g") for _ in range(5)} - {home}) == 1
    assert home not in {balancer.take(str(i)) for i in range(100)}


def test_no_server_is_chosen_if_all_are_drained() -> None:
    balancer = _load_balancer(("a",))
    balancer.drain("a")
    assert balancer.take("g") is None


@pytest.mark.parametrize(
    ("request_id", "group"), [("rollout1/a/0+3", "rollout1/a/0"), ("a+b+12", "a+b"), ("alone", "alone")]
)
def test_the_group_of_a_request(request_id: str, group: str) -> None:
    assert group_of(request_id) == group
