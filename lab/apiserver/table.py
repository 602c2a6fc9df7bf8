"""Returns objects as rows, which `kubectl get` prints (Accept: ...;as=Table). Pure.

Columns and cells follow the printers of Kubernetes 1.36 (pkg/printers/internalversion).
"""

from __future__ import annotations

import datetime as dt
from collections.abc import Callable, Iterable
from typing import Any

from lab.apiserver.status import Json

NONE = "<none>"
Row = Callable[[Json], list[Any]]


def _column(name: str, priority: int = 0, kind: str = "string") -> Json:
    shown = "name" if name == "Name" and priority == 0 else ""
    return {"name": name, "type": kind, "format": shown, "description": name, "priority": priority}


_DURATIONS = (
    (600, 60, 1, "ms"),
    (180 * 60, 60, 60, "m"),
    (8 * 3600, 3600, 60, "hm"),
    (48 * 3600, 3600, 3600, "h"),
    (8 * 86400, 86400, 3600, "dh"),
    (730 * 86400, 86400, 86400, "d"),
)
"""Rows of (upper limit in seconds, unit, smaller unit, letters of both units)."""


def human_duration(seconds: float) -> str:
    """Return a duration in kubectl's format of ages (duration.HumanDuration)."""
    s = max(0, int(seconds))
    if s < 120:
        return f"{s}s"
    for limit, unit, part, names in _DURATIONS:
        if s < limit:
            whole, rest = s // unit, s % unit // part
            return f"{whole}{names[0]}{rest}{names[1]}" if rest and names[1:] else f"{whole}{names[0]}"
    return f"{s // (365 * 86400)}y"


def age(moment: str | None) -> str:
    """Return the time since an API timestamp."""
    if not moment:
        return "<unknown>"
    then = dt.datetime.fromisoformat(moment)
    return human_duration((dt.datetime.now(dt.UTC) - then).total_seconds())


def _created(obj: Json) -> str:
    return age(obj["metadata"].get("creationTimestamp"))


def _joined(values: Iterable[object]) -> str:
    return ",".join(str(v) for v in values) or NONE


def _labels(labels: Json | None) -> str:
    return _joined(f"{k}={v}" for k, v in sorted((labels or {}).items()))


def _external(spec: Json, status: Json) -> str:
    ingress = [i.get("ip") or i.get("hostname", "") for i in (status.get("loadBalancer") or {}).get("ingress") or ()]
    outside = list(spec.get("externalIPs") or ())
    if spec.get("type") == "ExternalName":
        return str(spec.get("externalName", NONE))
    if spec.get("type") == "LoadBalancer":
        return ",".join(ingress + outside) or "<pending>"
    return _joined(outside)


def _service(obj: Json) -> list[Any]:
    spec = obj["spec"]
    ports = [
        f"{p['port']}:{p['nodePort']}/{p['protocol']}" if p.get("nodePort") else f"{p['port']}/{p['protocol']}"
        for p in spec.get("ports") or ()
    ]
    external = _external(spec, obj.get("status") or {})
    cluster_ip = spec.get("clusterIP") or NONE
    cells = [obj["metadata"]["name"], spec.get("type"), cluster_ip, external, _joined(ports)]
    return [*cells, _created(obj), _labels(spec.get("selector"))]


def _condition(obj: Json, name: str) -> str:
    for condition in (obj.get("status") or {}).get("conditions") or ():
        if condition.get("type") == name:
            return str(condition.get("status"))
    return "Unknown"


def _pod(obj: Json) -> list[Any]:
    spec, status = obj["spec"], obj.get("status") or {}
    total = len(spec.get("containers") or ())
    ready = total if _condition(obj, "Ready") == "True" else 0
    phase = "Terminating" if obj["metadata"].get("deletionTimestamp") else status.get("phase", "Pending")
    cells = [obj["metadata"]["name"], f"{ready}/{total}", phase, "0", _created(obj)]
    return [*cells, status.get("podIP") or NONE, spec.get("nodeName") or NONE, NONE, NONE]


def _node(obj: Json) -> list[Any]:
    status = obj.get("status") or {}
    state = {"True": "Ready", "False": "NotReady"}.get(_condition(obj, "Ready"), "Unknown")
    addresses: dict[str, str] = {}
    for address in status.get("addresses") or ():
        addresses.setdefault(address["type"], address["address"])
    info = status.get("nodeInfo") or {}
    cells = [obj["metadata"]["name"], state, NONE, _created(obj), info.get("kubeletVersion", "")]
    cells += [addresses.get("InternalIP", NONE), addresses.get("ExternalIP", NONE)]
    return cells + [info.get(k) or "<unknown>" for k in ("osImage", "kernelVersion", "containerRuntimeVersion")]


def _replication_controller(obj: Json) -> list[Any]:
    spec, status = obj["spec"], obj.get("status") or {}
    containers = spec["template"]["spec"].get("containers") or []
    cells = [obj["metadata"]["name"], spec.get("replicas", 0), status.get("replicas", 0)]
    cells += [status.get("readyReplicas", 0), _created(obj), _joined(c.get("name") for c in containers)]
    return [*cells, _joined(c.get("image") for c in containers), _labels(spec.get("selector"))]


def _few(values: list[str], empty: str) -> str:
    more = f" + {len(values) - 3} more..." if len(values) > 3 else ""
    return ",".join(values[:3]) + more if values else empty


def _endpoint_slice(obj: Json) -> list[Any]:
    ports = [str(p.get("port") or "*") for p in obj.get("ports") or ()]
    addresses = [a for e in obj.get("endpoints") or () for a in e.get("addresses") or ()]
    cells = [obj["metadata"]["name"], obj.get("addressType"), _few(ports, "<unset>"), _few(addresses, "<unset>")]
    return [*cells, _created(obj)]


def _endpoints(obj: Json) -> list[Any]:
    shown = [
        f"[{a['ip']}]:{p['port']}" if ":" in a["ip"] else f"{a['ip']}:{p['port']}"
        for subset in obj.get("subsets") or ()
        for p in subset.get("ports") or ()
        for a in subset.get("addresses") or ()
    ]
    return [obj["metadata"]["name"], _few(shown, NONE), _created(obj)]


def _config_map(obj: Json) -> list[Any]:
    count = len(obj.get("data") or ()) + len(obj.get("binaryData") or ())
    return [obj["metadata"]["name"], count, _created(obj)]


def _lease(obj: Json) -> list[Any]:
    return [obj["metadata"]["name"], (obj.get("spec") or {}).get("holderIdentity", ""), _created(obj)]


def _event(obj: Json) -> list[Any]:
    involved = obj.get("involvedObject") or {}
    last = obj.get("lastTimestamp") or obj.get("eventTime") or obj["metadata"].get("creationTimestamp")
    first = obj.get("firstTimestamp") or obj.get("eventTime") or obj["metadata"].get("creationTimestamp")
    source = (obj.get("source") or {}).get("component") or obj.get("reportingComponent", "")
    name = f"{involved.get('kind', '').lower()}/{involved.get('name', '')}"
    cells = [age(last), obj.get("type"), obj.get("reason"), name, involved.get("fieldPath", ""), source]
    return [*cells, obj.get("message", ""), age(first), obj.get("count") or 1, obj["metadata"]["name"]]


def _plain(obj: Json) -> list[Any]:
    return [obj["metadata"]["name"], _created(obj)]


def _namespace(obj: Json) -> list[Any]:
    return [obj["metadata"]["name"], (obj.get("status") or {}).get("phase"), _created(obj)]


def _service_cidr(obj: Json) -> list[Any]:
    return [obj["metadata"]["name"], _joined((obj.get("spec") or {}).get("cidrs") or ()), _created(obj)]


def _columns(text: str) -> list[Json]:
    """Return columns from their names: a name with a trailing + is shown only with -o wide, a name with a trailing # is
    a number."""
    found: list[Json] = []
    for name in text.split("|"):
        kind = "integer" if name.endswith("#") else "string"
        found.append(_column(name.rstrip("+#"), 1 if name.endswith("+") else 0, kind))
    return found


TABLES: dict[str, tuple[list[Json], Row]] = {
    "Service": (_columns("Name|Type|Cluster-IP|External-IP|Port(s)|Age|Selector+"), _service),
    "Pod": (_columns("Name|Ready|Status|Restarts|Age|IP+|Node+|Nominated Node+|Readiness Gates+"), _pod),
    "Node": (
        _columns(
            "Name|Status|Roles|Age|Version|Internal-IP+|External-IP+|OS-Image+|Kernel-Version+|Container-Runtime+"
        ),
        _node,
    ),
    "Namespace": (_columns("Name|Status|Age"), _namespace),
    "ReplicationController": (
        _columns("Name|Desired#|Current#|Ready#|Age|Containers+|Images+|Selector+"),
        _replication_controller,
    ),
    "EndpointSlice": (_columns("Name|AddressType|Ports|Endpoints|Age"), _endpoint_slice),
    "Endpoints": (_columns("Name|Endpoints|Age"), _endpoints),
    "ConfigMap": (_columns("Name|Data#|Age"), _config_map),
    "Lease": (_columns("Name|Holder|Age"), _lease),
    "ServiceCIDR": (_columns("Name|CIDRs|Age"), _service_cidr),
    "Event": (
        _columns("Last Seen|Type|Reason|Object|Subobject+|Source+|Message|First Seen+|Count+|Name+"),
        _event,
    ),
    "ServiceAccount": (_columns("Name|Age"), _plain),
}


def table(kind: str, api_version: str, objects: Iterable[Json], metadata: Json, include: str) -> Json:
    """A Table of objects (without kind); `include` is None, Metadata or Object, as the query's includeObject."""
    columns, cells = TABLES[kind]
    rows: list[Json] = []
    for obj in objects:
        row: Json = {"cells": cells(obj)}
        if include == "Object":
            row["object"] = {"kind": kind, "apiVersion": api_version} | obj
        elif include != "None":
            meta = {"kind": "PartialObjectMetadata", "apiVersion": "meta.k8s.io/v1", "metadata": obj["metadata"]}
            row["object"] = meta
        rows.append(row)
    header = {"kind": "Table", "apiVersion": "meta.k8s.io/v1", "metadata": metadata}
    return header | {"columnDefinitions": columns, "rows": rows}
