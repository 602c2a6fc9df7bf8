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
"""A word and what it needs:

- objects: ("put", resource, object), ("remove", resource, namespace, name), ("zone", name) of the Node, which
  ("no_node",) deletes until all is quiet, ("again",) sends every object once more, ("clear",) removes what they made
- the API server: ("api", faults), ("drop",) ends all connections to it, ("compact",) has it forget its history too,
  ("backup",) notes all objects, which ("restore",) and ("rollback",) bring back, with newer revisions and with older
  ones, ("elsewhere",) puts another cluster's server in its place, ("away", forgets) has it refuse everybody until
  ("back",), when it may have no history
- the proxy: ("kill",), ("restart",), ("configure", fields, flags), ("switch", mode), ("faulty", fault, number) as the
  launcher has them, ("pause", seconds) stops it, ("starve", what, seconds) lets it have no more of something
- another program: ("harm", what), ("foreign", kind) leaves the Go kube-proxy's rules, ("lock", seconds) holds the lock
  of iptables
- the node: ("node_address", address, present) gives it an address, or takes it away
- clients: ("late", slice, address, pod) writes a slice without the pod while UDP flows from the address to it begin
- judges: ("quiet",) waits and judges, ("settled", *judges) waits and asks these judges alone, ("look",) judges what
  holds at any moment, ("ask", name) has clients with session affinity ask a Service, ("health", port, count) asks a
  health check port for the number of ready endpoints, ("closed", name, address) asks a load balancer that admits nobody
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
