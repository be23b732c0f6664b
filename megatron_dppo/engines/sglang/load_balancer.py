"""Chooses the server for each request by the load of the servers."""

import random
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass
class _Place:
    """Load of one server, as known to this process."""

    num_in_flight: int = 0  # requests of this session without a response
    num_of_others: int = 0  # other requests that the server last reported
    is_drained: bool = False

    @property
    def load(self) -> int:
        return self.num_in_flight + self.num_of_others


class LoadBalancer:
    """Chooses a server for each request of one session; sends no request itself.

    It draws two servers at random and takes the less loaded one. If many processes share the servers and all
    sent to the least loaded one, they would overload it. The requests of a group go to the server of its last
    request, which has the prompt in its cache, unless that server is drained or full.
    """

    def __init__(self, urls: Sequence[str], max_in_flight: int, chance: random.Random | None = None) -> None:
        """Start with all servers admitted and idle.

        Args:
            urls: URLs of the servers.
            max_in_flight: Largest number of requests in flight at one server, from this session.
            chance: Random generator that draws the two servers; None creates one.
        """
        self._places = {url: _Place() for url in urls}
        self._max_in_flight = max_in_flight
        self._homes: dict[str, str] = {}
        self._chance = chance or random.Random()

    @property
    def serving(self) -> tuple[str, ...]:
        """URLs of the servers that are not drained."""
        return tuple(url for url, place in self._places.items() if not place.is_drained)

    def take(self, group: str) -> str | None:
        """Choose a server for a request of `group`, and count it as sent; return None if all are full."""
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
        """Count one request as no longer in flight at the server."""
        place = self._places[url]
        assert place.num_in_flight > 0, "a request is given back at most once"
        place.num_in_flight -= 1

    def report(self, url: str, num_requests: int) -> None:
        """Update a server's load: its running and waiting requests, including the requests of this session."""
        place = self._places[url]
        place.num_of_others = max(num_requests - place.num_in_flight, 0)

    def drain(self, url: str) -> None:
        """Stop choosing the server; each request in flight there still needs its `give_back`."""
        self._places[url].is_drained = True

    def _less_loaded(self, free: Sequence[str]) -> str:
        drawn = self._chance.sample(free, min(2, len(free)))
        return min(drawn, key=lambda url: self._places[url].load)


def group_of(request_id: str) -> str:
    """Return the group of a request: its id up to the last "+"."""
    return request_id.rpartition("+")[0] or request_id
