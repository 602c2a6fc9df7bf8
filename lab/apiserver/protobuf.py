"""Decodes protobuf bodies of the few kinds that Go clients send in protobuf (`kubectl create`, the events of
kube-proxy). Pure.

Answers are never protobuf, because a client that sends protobuf also accepts JSON. Field numbers are those of
generated.proto in k8s.io/api and apimachinery 1.36; fields that are not in the tables are ignored.
"""

from __future__ import annotations

import base64
import datetime as dt
import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from lab.apiserver.status import Json, bad_request

MAGIC = b"k8s\x00"
CONTENT_TYPE = "application/vnd.kubernetes.protobuf"

Scalar = Literal["string", "int", "bool", "time", "micro", "int-or-string"]


@dataclass(frozen=True, slots=True)
class Field:
    """One field: its JSON name and its type; a repeated field is a list, a map is from strings to strings or bytes."""

    name: str
    kind: Scalar | Literal["message", "map", "bytes-map"]
    message: Message | None = None
    is_list: bool = False


Message = dict[int, Field]


def _fields(text: str, kind: Scalar = "string") -> Message:
    """Return fields from pairs "number name"; a name with a trailing * is a list."""
    pairs = [p.split() for p in text.split(",")]
    return {int(n): Field(name.rstrip("*"), kind, is_list=name.endswith("*")) for n, name in pairs}


_META: Message = {
    **_fields("1 name, 2 generateName, 3 namespace, 5 uid, 6 resourceVersion, 14 finalizers*"),
    8: Field("creationTimestamp", "time"),
    11: Field("labels", "map"),
    12: Field("annotations", "map"),
}
_PORT: Message = {
    **_fields("1 name, 2 protocol, 6 appProtocol"),
    **_fields("3 port, 5 nodePort", "int"),
    4: Field("targetPort", "int-or-string"),
}
_AFFINITY: Message = {1: Field("clientIP", "message", _fields("1 timeoutSeconds", "int"))}
_SERVICE_SPEC: Message = {
    1: Field("ports", "message", _PORT, is_list=True),
    2: Field("selector", "map"),
    **_fields("3 clusterIP, 4 type, 5 externalIPs*, 7 sessionAffinity, 8 loadBalancerIP, 9 loadBalancerSourceRanges*"),
    **_fields("10 externalName, 11 externalTrafficPolicy, 17 ipFamilyPolicy, 18 clusterIPs*, 19 ipFamilies*"),
    **_fields("21 loadBalancerClass, 22 internalTrafficPolicy, 23 trafficDistribution"),
    **_fields("12 healthCheckNodePort", "int"),
    **_fields("13 publishNotReadyAddresses, 20 allocateLoadBalancerNodePorts", "bool"),
    14: Field("sessionAffinityConfig", "message", _AFFINITY),
}
_REFERENCE = _fields("1 kind, 2 namespace, 3 name, 4 uid, 5 apiVersion, 6 resourceVersion, 7 fieldPath")
_SOURCE = _fields("1 component, 2 host")
_SERIES: Message = {1: Field("count", "int"), 2: Field("lastObservedTime", "micro")}
_METADATA: Message = {1: Field("metadata", "message", _META)}

_ENDPOINT_ADDRESS: Message = {
    **_fields("1 ip, 3 hostname, 4 nodeName"),
    2: Field("targetRef", "message", _REFERENCE),
}
_ENDPOINT_PORT: Message = {**_fields("1 name, 3 protocol, 4 appProtocol"), **_fields("2 port", "int")}
_ENDPOINT_SUBSET: Message = {
    1: Field("addresses", "message", _ENDPOINT_ADDRESS, is_list=True),
    2: Field("notReadyAddresses", "message", _ENDPOINT_ADDRESS, is_list=True),
    3: Field("ports", "message", _ENDPOINT_PORT, is_list=True),
}
_LEASE_SPEC: Message = {
    **_fields("1 holderIdentity, 6 strategy, 7 preferredHolder"),
    **_fields("2 leaseDurationSeconds, 5 leaseTransitions", "int"),
    **_fields("3 acquireTime, 4 renewTime", "micro"),
}

MESSAGES: dict[tuple[str, str], Message] = {
    ("v1", "ConfigMap"): {
        **_METADATA,
        2: Field("data", "map"),
        3: Field("binaryData", "bytes-map"),
        **_fields("4 immutable", "bool"),
    },
    ("v1", "Endpoints"): {**_METADATA, 2: Field("subsets", "message", _ENDPOINT_SUBSET, is_list=True)},
    ("coordination.k8s.io/v1", "Lease"): {**_METADATA, 2: Field("spec", "message", _LEASE_SPEC)},
    ("v1", "Namespace"): _METADATA,
    ("v1", "ServiceAccount"): _METADATA,
    ("v1", "Service"): {**_METADATA, 2: Field("spec", "message", _SERVICE_SPEC)},
    ("events.k8s.io/v1", "Event"): {
        **_METADATA,
        2: Field("eventTime", "micro"),
        3: Field("series", "message", _SERIES),
        **_fields("4 reportingController, 5 reportingInstance, 6 action, 7 reason, 10 note, 11 type"),
        8: Field("regarding", "message", _REFERENCE),
        9: Field("related", "message", _REFERENCE),
        12: Field("deprecatedSource", "message", _SOURCE),
        13: Field("deprecatedFirstTimestamp", "time"),
        14: Field("deprecatedLastTimestamp", "time"),
        15: Field("deprecatedCount", "int"),
    },
}


def decode_protobuf(raw: bytes, api_version: str, kind: str) -> Json | None:
    """Return the JSON form of a body, or None for a kind without a table. Raises ApiError 400 for invalid protobuf."""
    message = MESSAGES.get((api_version, kind))
    if message is None:
        return None
    if not raw.startswith(MAGIC):
        raise bad_request("the object provided is unrecognized: a protobuf body starts with k8s\\x00")
    try:
        envelope = dict(_split(raw[len(MAGIC) :]))
        # runtime.Unknown: 1 typeMeta, 2 raw.
        given = {number: value.decode() for number, value in _split(envelope.get(1, b"")) if isinstance(value, bytes)}
        obj = _message(envelope.get(2, b""), message)
    except (ValueError, IndexError, TypeError, OverflowError, AttributeError) as e:
        raise bad_request(f"the object provided is no protobuf of {kind}: {e}") from e
    return {"apiVersion": given.get(1) or api_version, "kind": given.get(2) or kind} | obj


def _varint(raw: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = raw[at]
        value |= (byte & 0x7F) << shift
        at += 1
        if byte < 0x80:
            return value, at
        shift += 7
        if shift > 63:
            raise ValueError("a number of more than 64 bits")


def _split(raw: bytes) -> list[tuple[int, Any]]:
    """Yield the field number and the value (int or bytes) of each field in wire format."""
    found: list[tuple[int, Any]] = []
    at = 0
    while at < len(raw):
        tag, at = _varint(raw, at)
        number, wire = tag >> 3, tag & 7
        if wire == 0:
            value, at = _varint(raw, at)
            found.append((number, value - (1 << 64) if value >> 63 else value))
            continue
        if wire == 2:
            size, at = _varint(raw, at)
        elif wire in {1, 5}:
            size = 8 if wire == 1 else 4
        else:
            raise ValueError(f"wire type {wire}")
        if at + size > len(raw):
            raise ValueError("it ends early")
        found.append((number, raw[at : at + size]))
        at += size
    return found


def _message(raw: bytes, message: Message) -> Json:
    result: Json = {}
    for number, value in _split(raw):
        field = message.get(number)
        if field is None:
            continue
        if field.kind in {"map", "bytes-map"}:
            entry = dict(_split(value))
            content = entry.get(2, b"")
            text = content.decode() if field.kind == "map" else base64.b64encode(content).decode()
            result.setdefault(field.name, {})[entry.get(1, b"").decode()] = text
        elif field.is_list:
            result.setdefault(field.name, []).append(_value(value, field))
        else:
            result[field.name] = _value(value, field)
    # Go's generated code writes empty strings and zero times; JSON leaves them out.
    return {k: v for k, v in result.items() if v not in ("", None, {})}


def _value(value: Any, field: Field) -> Any:
    if field.kind == "message":
        return _message(value, field.message or {})
    return _SCALARS[field.kind](value)


def _int_or_string(value: bytes) -> int | str:
    parts = dict(_split(value))
    text: bytes = parts.get(3, b"")
    return text.decode() if parts.get(1) else int(parts.get(2, 0))


def _moment(value: bytes, *, micro: bool) -> str | None:
    parts = dict(_split(value))
    if not parts:
        return None
    whole = dt.datetime.fromtimestamp(parts.get(1, 0), dt.UTC).strftime("%Y-%m-%dT%H:%M:%S")
    return f"{whole}.{parts.get(2, 0) // 1000:06d}Z" if micro else f"{whole}Z"


_SCALARS: dict[str, Callable[[Any], Any]] = {
    "string": bytes.decode,
    "bool": bool,
    "int": int,
    "int-or-string": _int_or_string,
    "time": functools.partial(_moment, micro=False),
    "micro": functools.partial(_moment, micro=True),
}
