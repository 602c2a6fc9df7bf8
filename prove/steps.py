"""The steps of a history, as plain JSON; each step has a meaning without the earlier steps.

So any step can be removed, to reduce a failing history to a small one. In place of an address an endpoint may have the
name of a pod of the lab ("a1"); other texts are not changed.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

Json = dict[str, Any]
Step = tuple[Any, ...]
"""A step's name and its arguments:

- objects: ("put", resource, object), ("remove", resource, namespace, name), ("zone", name) sets the Node's zone,
  ("no_node",) deletes the Node until all is quiet, ("again",) sends every object once more, ("clear",) removes the
  history's objects
- the API server: ("api", faults), ("drop",) ends all connections to it, ("compact",) also deletes its history,
  ("backup",) stores all objects, ("restore",) and ("rollback",) restore them, with newer and with older revisions,
  ("elsewhere",) replaces it by another cluster's server, ("away", forgets) makes it refuse all connections until
  ("back",), possibly without its history
- the proxy: ("kill",), ("restart",), ("configure", fields, flags), ("switch", mode), ("faulty", fault, number) restarts
  it with a fault of the launcher, ("pause", seconds) stops it, ("starve", what, seconds) limits a resource
- another program: ("harm", what), ("foreign", kind) leaves the Go kube-proxy's rules, ("lock", seconds) holds the
  iptables lock
- the node: ("node_address", address, present) adds an address to it, or removes it
- clients: ("late", slice, address, pod) writes a slice without the pod while UDP flows from the address to it begin
- judges: ("quiet",) waits and judges, ("settled", *judges) waits and calls only these judges, ("look",) checks the
  conditions that always hold, ("ask", name) sends requests of clients with session affinity to a Service,
  ("health", port, count) compares the number of ready endpoints at a health check port, ("closed", name, address)
  connects to a load balancer that admits no client
"""


def copied(value: Any) -> Any:
    """Return a deep copy of JSON."""
    if isinstance(value, dict):
        return {name: copied(one) for name, one in value.items()}
    return [copied(one) for one in value] if isinstance(value, list) else value


def written(steps: Sequence[Step]) -> str:
    """Return steps as Python, one line per step."""
    return "".join(f"        {step!r},\n" for step in steps)


def as_test(steps: Sequence[Step], mode: str, complaint: str) -> str:
    """Return a test that plays a history, for tests/prove/test_prove_found.py, whose imports it needs."""
    first = complaint.splitlines()[0] if complaint else ""
    return (
        f"async def test_a_history_that_failed() -> None:\n    # {first}\n    history: list[Step] = [\n"
        f'{written(steps)}    ]\n    assert await played(history, mode="{mode}") == []\n'
    )


def dumped(steps: Sequence[Step]) -> str:
    """Return steps as a line of JSON for `read`."""
    return json.dumps(steps)


def read(text: str) -> list[Step]:
    """Return the steps in a line of JSON. Raises ValueError."""
    return [tuple(step) for step in json.loads(text)]
