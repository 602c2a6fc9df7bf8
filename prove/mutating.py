"""Mutations of important lines of the proxy, in memory; the launcher starts a proxy with one of them.

Imports nothing of the proxy: a mutation is applied when its module is imported.
"""

from __future__ import annotations

import importlib.machinery
from pathlib import Path
from typing import NamedTuple

SOURCE = Path(__file__).parents[1] / "src" / "kubeproxy"


class Mutation(NamedTuple):
    """A line of a file of the proxy, and its replacement; the mutation is found by `histories`, or only by `answers`.

    `complaint` is a regular expression of the complaint that finds it: a busy machine may cause others.
    """

    file: str
    line: str
    instead: str
    by: str = "histories"
    complaint: str = ""


MUTATIONS: dict[str, Mutation] = {
    "a relist deletes nothing": Mutation(
        "model/planner.py", "gone = [name for name in self._known(event.resource) if name not in seen]", "gone = []"
    ),
    "a slice that moves stays with its Service": Mutation(
        "model/planner.py", "if previous is not None and previous != owner:", "if False:"
    ),
    "contested addresses go to everybody": Mutation(
        "model/claims.py",
        "if owner is not None and owner != (claimant.writing if written else claimant):",
        "if False:",
    ),
    "elements whose data changes stay": Mutation(
        "backends/state.py", "gone = [key for key, value in old.items() if new.get(key) != value]", "gone = []"
    ),
    "what two Services share goes with the first": Mutation(
        "backends/nftables/packing.py", "if users[key] > 0:", "if users[key] > 99:"
    ),
    "adoption removes no strays": Mutation(
        "backends/nftables/backend.py", "yield from self._remove(elements.left)", "pass"
    ),
    "ServiceCIDRs are written once": Mutation(
        "backends/nftables/backend.py",
        "if (present := self._node[name]) != wanted:",
        "if not (present := self._node[name]):",
    ),
    "other programs are not noticed": Mutation("backends/nftables/backend.py", "if changes.nothing or", "if True or"),
    "a watch goes on after 410": Mutation("api/watch.py", "raise changes.error", "pass"),
    "a refusal forgets what was queued": Mutation(
        "engine/backlog.py", "self.stale = self.resting = True", "self.resting = True; self.changes.clear()"
    ),
    "endpoints that do not serve any more are chosen": Mutation(
        "model/endpoints.py", "if not e.ready and e.serving and e.terminating}", "if not e.ready}"
    ),
    "a refused transaction is taken for done": Mutation(
        "kernel/nftables/nfnetlink.py",
        "if code and complaint is None and at.sequence",
        "if False and at.sequence",
        "answers",
    ),
    "an answer of ENOBUFS is taken for success": Mutation(
        "kernel/nftables/nfnetlink.py",
        "if code and complaint is None and at.sequence",
        "if code not in (0, errno.ENOBUFS) and complaint is None and at.sequence",
        "answers",
    ),
    "stale UDP flows stay": Mutation(
        "report/flows.py",
        "if wrong:\n                self",
        "if False:\n                self",
        complaint="stale flow: ",
    ),
    "stale UDP flows are searched once": Mutation(
        "report/flows.py",
        "if first:\n            second.append",
        "if False:\n            second.append",
        complaint="stale flow: ",
    ),
    "a health check counts unready endpoints": Mutation(
        "model/compile.py",
        "if e.ready and e.node == world.node_name}",
        "if e.node == world.node_name}",
        complaint=r"health check \d+: \d",
    ),
    "clients with session affinity stay in slots": Mutation(
        "backends/nftables/render.py",
        "return {each: before.get(each) or self._new_endpoint(family) for each in dict.fromkeys(pool)}",
        "return dict(zip(dict.fromkeys(pool), [*before.values(), *(self._new_endpoint(family) for _ in pool)]))",
        complaint="client: ",
    ),
    "numbers of endpoints are reused after a restart": Mutation(
        "backends/nftables/affinity.py",
        "self.number = max(0, there - FIRST_ENDPOINT)\n        return there",
        "self.number = max(0, there - FIRST_ENDPOINT)\n        return 0",
        complaint="client: |packet: ",
    ),
    "keys that move between Services are not grouped": Mutation(
        "backends/nftables/packing.py", "if giver is not None:", "if False:", complaint="verify: |dump: |packet: "
    ),
    "local addresses are read once": Mutation(
        "engine/engine.py",
        "self.local_addresses = await to_its_end(self._read_addresses)",
        "self.local_addresses = self.local_addresses or await to_its_end(self._read_addresses)",
        complaint="NodePorts answer on ",
    ),
    "an unreadable source range opens a load balancer": Mutation(
        "model/spec.py",
        "            unreadable = True\n",
        "            unreadable = False\n",
        complaint="plans of |closed: ",
    ),
    "a deleted ServiceCIDR stays": Mutation("model/planner.py", "self.service_cidrs.pop(name[1], None)", "pass"),
}


def broken(text: str, mutation: Mutation) -> str:
    """Return a file's text with the mutation applied.

    Raises ValueError unless the file contains the line exactly once.
    """
    if text.count(mutation.line) != 1:
        raise ValueError(f"{mutation.file}: {mutation.line!r} is there {text.count(mutation.line)} times")
    return text.replace(mutation.line, mutation.instead)


def apply(name: str) -> None:
    """Apply a mutation in this process, before its module is imported."""
    mutation = MUTATIONS[name]
    path = str(SOURCE / mutation.file)
    source_to_code = importlib.machinery.SourceFileLoader.source_to_code
    path_stats = importlib.machinery.SourceFileLoader.path_stats

    def stats(loader: importlib.machinery.SourceFileLoader, where: str) -> object:
        if where == path:
            raise OSError("compiled anew")
        return path_stats(loader, where)

    def compiled(loader: importlib.machinery.SourceFileLoader, data: bytes, where: str, **more: int) -> object:
        return source_to_code(
            loader, broken(data.decode(), mutation).encode() if where == path else data, where, **more
        )

    importlib.machinery.SourceFileLoader.path_stats = stats  # type: ignore[assignment,method-assign]
    importlib.machinery.SourceFileLoader.source_to_code = compiled  # type: ignore[assignment,method-assign]
