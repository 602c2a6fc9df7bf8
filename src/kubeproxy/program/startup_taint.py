"""Removes the taint that keeps pods off a new node, once, after the first full sync. If the node has no taint, pods may
start before the rules are in place, and their first connections fail (Kubernetes issue 75890). The kubelet sets the
taint (--register-with-taints); the proxy never sets it. See docs/beyond.md "Readiness"."""

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
"""The HTTP statuses of a patch for an outdated Node: a test in the patch failed, or the Node was deleted."""

Tell = Callable[[Literal["Normal", "Warning"], str, str], None]
"""A function that records an Event about the Node, with type, reason and note."""


def removal(node: Node, key: str) -> bytes | None:
    """Return the JSON patch that removes a Node's taints with this key, or None without such a taint. The patch fails
    if the list of taints has changed."""
    taints = (node.spec.taints if node.spec is not None else None) or ()
    operations: list[dict[str, str]] = []
    for place in reversed([place for place, taint in enumerate(taints) if taint.key == key]):
        path = f"/spec/taints/{place}"
        operations.append({"op": "test", "path": f"{path}/key", "value": key})
        operations.append({"op": "remove", "path": path})
    return msgspec.json.encode(operations) if operations else None


async def remove(key: str, name: str, node: Callable[[], Node | None], patch: Patch, tell: Tell) -> None:
    """Remove the taints with this key from a Node; retry after a failure. `node` returns the Node's last known
    state."""
    backoff = Backoff(FIRST_RETRY, SLOWEST_RETRY)
    while True:
        if (known := node()) is not None:
            body = removal(known, key)
            if body is None:
                log.info("The Node does not have the startup taint key=%s", key)
                return
            if await _sent(body, key, name, patch, tell):
                tell("Normal", "StartupTaintRemoved", f"Services are programmed: removed the taint {key}")
                return
        await asyncio.sleep(backoff.failed())


async def _sent(body: bytes, key: str, name: str, patch: Patch, tell: Tell) -> bool:
    try:
        status = await patch(f"/api/v1/nodes/{name}", body)
    except (SourceError, OSError) as error:
        log.warning("Cannot remove the startup taint, trying again key=%s error=%r", key, str(error))
        return False
    is_done = 200 <= status < 300
    if status == FORBIDDEN:
        note = (
            f"not allowed to patch Nodes, so the taint {key} keeps pods off this node: bind the ClusterRole "
            "kube-proxy-py-startup-taint (startupTaint in the chart, the component startup-taint of kustomize)"
        )
        tell("Warning", "StartupTaintStays", note)
    elif not is_done and status not in BEHIND:
        tell("Warning", "StartupTaintStays", f"the API server answered {status} to removing {key}")
    return is_done
