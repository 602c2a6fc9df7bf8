"""Names of chains, and text that may stand in a rule. Pure.

Chains are named as by the Go kube-proxy, so that tools and runbooks know them and the two can follow each other.
Source: kube-proxy v1.36 pkg/proxy/iptables/proxier.go, portProtoHash and servicePortEndpointChainName.
"""

from __future__ import annotations

import re
from hashlib import sha256
from typing import Final

from kubeproxy.model.addresses import PROTOCOLS
from kubeproxy.model.plan import ServicePortKey

PROTOCOL_WORDS: Final = {number: name.lower() for name, number in PROTOCOLS.items()}

SVC: Final = "KUBE-SVC-"
SVL: Final = "KUBE-SVL-"
EXT: Final = "KUBE-EXT-"
FW: Final = "KUBE-FW-"
SEP: Final = "KUBE-SEP-"
SERVICE_PREFIXES: Final = (SVC, SVL, EXT, FW, SEP, "KUBE-XLB-")
"""Chains that belong to a Service; KUBE-XLB- is EXT's name before 1.24."""

_ALPHABET: Final = "ABCDEFGHIJKLMNOPQRSTUVWXYZ234567"  # RFC 4648
_PAIRS: Final = [a + b for a in _ALPHABET for b in _ALPHABET]
_PLAIN: Final = re.compile(r"[A-Za-z0-9./:_-]{0,200}")
_ODD: Final = re.compile(r"[^A-Za-z0-9./:_-]")


def chain_hash(text: str) -> str:
    """Return the first 16 characters of the base32 of a text's SHA-256: 80 bits, ten at a time."""
    bits = int.from_bytes(sha256(text.encode(errors="surrogatepass")).digest()[:10], "big")
    pairs = _PAIRS
    return (
        f"{pairs[bits >> 70]}{pairs[bits >> 60 & 1023]}{pairs[bits >> 50 & 1023]}{pairs[bits >> 40 & 1023]}"
        f"{pairs[bits >> 30 & 1023]}{pairs[bits >> 20 & 1023]}{pairs[bits >> 10 & 1023]}{pairs[bits & 1023]}"
    )


def port_name(key: ServicePortKey) -> str:
    """Return a service port as the Go kube-proxy writes it: namespace/name:port, without the colon for no name."""
    return f"{key.namespace}/{key.name}:{key.port_name}" if key.port_name else f"{key.namespace}/{key.name}"


def comment(text: str) -> str:
    """Return a user's words as they may stand inside a quoted comment.

    Names that the API server accepts stay as they are. Others, as from a folder of manifests, lose what could end
    the comment or the line, and what iptables would refuse as too long (255 bytes with what is added).
    """
    return text if _PLAIN.fullmatch(text) else _ODD.sub("_", text[:200])
