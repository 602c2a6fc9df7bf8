"""The taint that prevents pods on a new node until its Services work: removed once, after the first full sync.
Kubernetes issue 75890: if pods start before the rules are in place, their first connections fail. The kubelet sets the
taint (--register-with-taints); the proxy never sets it. See docs/beyond.md "Readiness".
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Final, Literal

import msgspec

from kubeproxy.engine.pacing import Backoff
from kubeproxy.errors import SourceError
from kubeproxy.model.objects import Node
from kubeproxy.setup.sources import Patch

log = logging.getLogger("kubeproxy.startup")

FIRST_RETRY: Final = 0.2  # seconds
SLOWEST_RETRY: Final = 30.0

FORBIDDEN: Final = 403
BEHIND: Final = frozenset((404, 409, 422))
"""HTTP statuses of a patch for an outdated state of the Node: a test in the patch failed, or the Node was deleted."""

Tell = Callable[[Literal["Normal", "Warning"], str, str], None]
"""Records an event of the Node: kind, reason and note."""


def removal(node: Node, key: str) -> bytes | None:
    """Return the JSON patch that removes a Node's taints of a key, or fails if their list changed; None for none."""
    taints = (node.spec.taints if node.spec is not None else None) or ()
    operations: list[dict[str, str]] = []
    for place in reversed([place for place, taint in enumerate(taints) if taint.key == key]):
        path = f"/spec/taints/{place}"
        operations.append({"op": "test", "path": f"{path}/key", "value": key})
        operations.append({"op": "remove", "path": path})
    return msgspec.json.encode(operations) if operations else None


class StartupTaint:
    """Removes the taints of a key from a Node, with retries. `node` returns the last state of the Node."""

    def __init__(self, key: str, name: str, node: Callable[[], Node | None], patch: Patch, tell: Tell) -> None:
        self._key = key
        self._name = name
        self._node = node
        self._patch = patch
        self._tell = tell
        self._backoff = Backoff(FIRST_RETRY, SLOWEST_RETRY)

    async def remove(self) -> None:
        """Return once the Node does not have the taint."""
        while True:
            node = self._node()
            if node is not None:
                patch = removal(node, self._key)
                if patch is None:
                    log.info("The Node does not have the startup taint key=%s", self._key)
                    return
                if await self._removed(patch):
                    note = f"Services are programmed: removed the taint {self._key}"
                    self._tell("Normal", "StartupTaintRemoved", note)
                    return
            await asyncio.sleep(self._backoff.failed())

    async def _removed(self, patch: bytes) -> bool:
        """Send the patch; return whether it was applied."""
        try:
            status = await self._patch(f"/api/v1/nodes/{self._name}", patch)
        except (SourceError, OSError) as error:
            log.warning("Cannot remove the startup taint, trying again key=%s error=%r", self._key, str(error))
            return False
        if 200 <= status < 300:
            return True
        if status == FORBIDDEN:
            note = (
                f"not allowed to patch Nodes, so the taint {self._key} stays, and pods off this node: bind the "
                "ClusterRole kube-proxy-py-startup-taint (startupTaint in the chart, the component startup-taint of "
                "kustomize)"
            )
            self._tell("Warning", "StartupTaintStays", note)
        elif status not in BEHIND:
            self._tell("Warning", "StartupTaintStays", f"the API server answered {status} to removing {self._key}")
        return False
