"""Chooses the server that a request goes to, by what each one has to do."""

import random
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass
class _Place:
    """The load of one server, as this process sees it."""

    num_in_flight: int = 0  # sent by us, and not answered
    num_of_others: int = 0  # what the server last reported beyond those
    is_drained: bool = False

    @property
    def load(self) -> int:
        return self.num_in_flight + self.num_of_others


class LoadBalancer:
    """Chooses a server for each request of one session; sends no request itself.

    Two servers are drawn at random, and the less loaded gets the request: with many processes that send to the
    same servers, all of them on the least loaded one would be as bad as all on any. The requests of a group go
    where its last one went, since that server has the prompt in its cache, unless it is drained or full.
    """

    def __init__(self, urls: Sequence[str], max_in_flight: int, chance: random.Random | None = None) -> None:
        """Start with all servers admitted and idle.

        Args:
            urls: The servers.
            max_in_flight: Requests of this process that one server is given at a time.
            chance: Draws the two; none: of its own.
        """
        self._places = {url: _Place() for url in urls}
        self._max_in_flight = max_in_flight
        self._homes: dict[str, str] = {}
        self._chance = chance or random.Random()

    @property
    def serving(self) -> tuple[str, ...]:
        """Servers that are not drained."""
        return tuple(url for url, place in self._places.items() if not place.is_drained)

    def take(self, group: str) -> str | None:
        """Return the server for one more request of `group`, and count it as sent; none where all are full."""
        free = [url for url in self.serving if self._places[url].num_in_flight < self._max_in_flight]
        if not free:
            return None
        url = self._homes.get(group)
        if url not in free:
            url = self._less_loaded(free)
            self._homes[group] = url
        self._places[url].num_in_flight += 1
        return url

    def give_back(self, url: str) -> None:
        """Count a request of ours as no longer at the server, answered or not."""
        place = self._places[url]
        assert place.num_in_flight > 0, "what is given back was taken"
        place.num_in_flight -= 1

    def report(self, url: str, num_requests: int) -> None:
        """Update a server's load: the requests that it runs or has waiting, ours among them."""
        place = self._places[url]
        place.num_of_others = max(num_requests - place.num_in_flight, 0)

    def drain(self, url: str) -> None:
        """Send the server no more requests; each one it still has needs its `give_back`."""
        self._places[url].is_drained = True

    def _less_loaded(self, free: Sequence[str]) -> str:
        drawn = self._chance.sample(free, min(2, len(free)))
        return min(drawn, key=lambda url: self._places[url].load)


def group_of(request_id: str) -> str:
    """Return the group of a request: its id up to the last "+"."""
    return request_id.rpartition("+")[0] or request_id
