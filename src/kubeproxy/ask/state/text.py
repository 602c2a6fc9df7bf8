"""The text form of /debug/state: turns the JSON values of ask/state into lines."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from kubeproxy.server.text import printable

Json = dict[str, Any]

_POOLS = (
    ("endpoints", "endpoints", "weights"),
    ("localEndpoints", "local", "localWeights"),
    ("drainedEndpoints", "drained", ""),
    ("otherEndpoints", "others", ""),
)
"""Endpoints in the text: their key in the JSON, their label, and the key of their weights."""


def node_text(node: Json) -> bytes:
    """Return the lines about the node."""
    zone = f" in zone {node['zone']}" if node["zone"] else ""
    ready = "ready" if node["ready"] else "not ready"
    counts = f"{node['serviceCount']} Services, {node['pendingCount']} pending"
    lines = [f"kube-proxy {node['version']}, mode {node['mode']}, node {node['node']}{zone}: {ready}, {counts}"]
    lines += [f"  {check}: {reason}" for check, reason in node["unready"].items()]
    for family, facts in node["families"].items():
        ports = facts["nodePortAddresses"]
        where = ports if isinstance(ports, str) else ", ".join(ports) or "no address"
        since = f" since {facts['wholeSince']}" if facts["wholeSince"] else ""
        seen = f"last seen whole {facts['lastSeenWhole'] or 'never'}"
        lines.append(f"{family}: {facts['state']}{since}, {seen}, last synced {facts['lastSynced'] or 'never'}")
        lines.append(f"  traffic of pods: {facts['podTraffic']}; NodePorts on: {where}")
        lines += [f"  {state}: {facts[state]}" for state in ("refused", "differs") if facts[state]]
    return _page(lines)


def service_text(found: Json) -> bytes:
    """Return the lines of one Service, after an empty one."""
    lines = [f"{found['namespace']}/{found['name']}: {found['state']}{_version(found.get('resourceVersion'))}"]
    if "reason" in found:
        lines.append(f"  {found['reason']}")
    lines += [f"  slice {name}{_version(version)}" for name, version in found.get("slices", {}).items()]
    zones = found.get("zones", {})
    for zone in sorted(set(zones.values())):
        lines.append(f"  zone {zone}: {' '.join(address for address, its in zones.items() if its == zone)}")
    lines += [f"  problem: {problem}" for problem in found.get("problems", ())]
    if "healthCheck" in found:
        health = found["healthCheck"]
        counts = ", ".join(f"{count} {family}" for family, count in health["localEndpoints"].items())
        lines.append(f"  health check port {health['port']}, local endpoints: {counts}")
    committed = found.get("committed", ())
    for port in found.get("ports", ()):
        lines += _port_lines(port, "wanted: " if port not in committed and "committed" in found else "")
    for port in committed:
        if port not in found.get("ports", ()):
            lines += _port_lines(port, "last committed: ")
    return b"\n" + _page(lines)


def _page(lines: list[str]) -> bytes:
    return "".join(f"{printable(line)}\n" for line in lines).encode()


def _version(version: str | None) -> str:
    return f", version {version}" if version else ""  # objects of a manifest folder have no version


def _port_lines(port: Json, title: str) -> Iterator[str]:
    affinity = f", affinity {port['affinitySeconds']} s" if "affinitySeconds" in port else ""
    affinity += f", {port['algorithm']}" if "algorithm" in port else ""
    name = f"{port['name']} " if port["name"] else ""
    yield f"  {title}{name}{port['protocol']} {port['family']}{affinity}"
    for frontend in port["frontends"]:
        ways = {"pods": frontend["fromPods"], "node": frontend["fromNode"], "outside": frontend["fromOutside"]}
        parts = []
        for action in dict.fromkeys(ways.values()):
            origins = [origin for origin, given in ways.items() if given == action]
            parts.append(f"{'all' if len(origins) == 3 else ', '.join(origins)} -> {action}")
        yield f"    {frontend['kind']:12} {frontend['address']:21} {'; '.join(parts)}"
        if "sources" in frontend:
            yield f"    {'':12} only from {', '.join(frontend['sources']) or 'nowhere'}"
    if "reason" in port:
        yield f"    {'endpoints':12} none: {port['reason']}"
    for key, label, weights in _POOLS:
        if port.get(key):
            weighed = port.get(weights, {})
            texts = [f"{one} ({weighed[one]})" if one in weighed else one for one in port[key]]
            yield f"    {label:12} {' '.join(texts)}"
