"""How ranks of several nodes find each other, and notice that one cannot be reached."""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.nodes.lab import Lab
from tests.nodes.ranks import Rank, Ranks, starting_ranks
from tests.support.processes import wait_until

_NODES = ("n0", "n1", "n2")
_JOIN_S = 8.0  # of ranks that cannot meet
_LONG_S = 300.0  # of what must not take so long


@pytest.fixture(scope="module")
def ranks(session_lab: Lab) -> Iterator[Ranks]:
    """Starts ranks 0, 1 and 2 on nodes n0, n1 and n2."""
    session_lab.repair()
    with starting_ranks([session_lab.nodes[name] for name in _NODES]) as ranks:
        yield ranks


@dataclass(frozen=True)
class Names:
    """Names that each of two nodes resolves, the address given for rank 0, and the expected result."""

    hosts: dict[str, list[str]]  # lines of /etc/hosts
    master: str
    must_meet: bool = False
    words: str = ""  # in every rank's message, if they do not meet
    down: str = ""  # a card of n1


def _both(*lines: str) -> dict[str, list[str]]:
    return {name: list(lines) for name in _NODES[:2]}


_CARD_0 = ("10.99.0.2 n0", "10.99.0.3 n1")
_CARD_1 = ("10.98.0.2 n0", "10.98.0.3 n1")
_NAMES = {
    "names of both": Names(_both(*_CARD_0), "n0", must_meet=True),
    "own name at 127.0.1.1": Names(
        {"n0": ["127.0.1.1 n0", _CARD_0[1]], "n1": ["127.0.1.1 n1", _CARD_0[0]]},
        "10.99.0.2",
        words="GLOO_SOCKET_IFNAME",
    ),
    "no names": Names(_both(), "10.99.0.2", words="GLOO_SOCKET_IFNAME"),
    "rank 0 has a name that the other does not know": Names(
        {"n0": [*_CARD_0], "n1": [_CARD_0[1]]}, "n0", words="n0"
    ),
    "names of second cards": Names(_both(*_CARD_1), "n0", must_meet=True),
    "names of second cards, one of which is down": Names(
        _both(*_CARD_1), "10.99.0.2", words="GLOO_SOCKET_IFNAME", down="eth1"
    ),
    "names of IPv6": Names(_both("fd99::2 n0", "fd99::3 n1"), "n0", must_meet=True),
    "an address of IPv6": Names(_both("fd99::2 n0", "fd99::3 n1"), "fd99::2", must_meet=True),
}


@pytest.mark.parametrize("case", _NAMES.values(), ids=_NAMES)
def test_ranks_meet_or_every_rank_says_why_not(lab: Lab, ranks: Ranks, tmp_path: Path, case: Names) -> None:
    for name, lines in case.hosts.items():
        lab.nodes[name].write_hosts(["127.0.0.1 localhost", "::1 localhost", *lines])
    if case.down:
        lab.nodes["n1"].ask("ip", "link", "set", case.down, "down")
    try:
        join_s = _LONG_S if case.must_meet else _JOIN_S
        said = _meet(ranks.start(tmp_path, "meet", _LONG_S, join_s, master=case.master))
    finally:
        if case.down:
            lab.nodes["n1"].ask("ip", "link", "set", case.down, "up")
    if case.must_meet or said[0]["outcome"] == "met":
        assert [rank["outcome"] for rank in said] == ["met", "met"], said
        assert all(rank["message"] == "n0 n1" for rank in said)
    else:
        assert [rank["outcome"] for rank in said] == ["LaunchError", "LaunchError"], said
        assert all(case.words in rank["message"] for rank in said), said


def test_two_ranks_that_reach_only_the_first_end_all(lab: Lab, ranks: Ranks, tmp_path: Path) -> None:
    lab.cut("n1", "n2")
    said = _meet(ranks.start(tmp_path, "meet", _LONG_S, _JOIN_S, master="n0", count=3))
    assert [rank["outcome"] for rank in said] == ["LaunchError"] * 3, said


def _meet(ranks: list[Rank]) -> list[dict[str, Any]]:
    for rank in ranks:
        rank.wait(_LONG_S + _JOIN_S)
    said = [json.loads(line) for rank in ranks for line in rank.output.splitlines() if line.startswith("{")]
    assert [each["rank"] for each in said] == list(range(len(ranks))), [rank.output for rank in ranks]
    return said


def test_a_silent_node_is_noticed_in_time(lab: Lab, ranks: Ranks, tmp_path: Path) -> None:
    """Whether there is something on the way to it or nothing."""
    timeout_s = 10.0
    pairs = [ranks.start(tmp_path, "watch", mode, timeout_s, master="n0") for mode in ("moving", "static")]
    everyone = [rank for pair in pairs for rank in pair]
    wait_until(lambda: all("watches" in rank.output for rank in everyone), _LONG_S)
    lab.cut("n1")
    for rank in everyone:
        assert rank.wait(_LONG_S) != 0
    for head, member in pairs:
        assert "rank 1 (host n1, " in head.output
        assert "rank 0 (host n0, " in member.output
