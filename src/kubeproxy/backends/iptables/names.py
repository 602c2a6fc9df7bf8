"""Names of chains, and text that may stand in a rule. Pure.

The names are those of the Go kube-proxy, so that tools and runbooks fit and either proxy can take over from the other.
Source: kube-proxy v1.36 pkg/proxy/iptables/proxier.go, portProtoHash and servicePortEndpointChainName.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
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
SERVICE_PREFIXES: Final = (FW, "KUBE-XLB-", EXT, SVL, SVC, SEP)
"""Prefixes of Services' chains; a chain precedes those it jumps to. KUBE-XLB- is EXT's name before 1.24."""

COPY: Final = f"{SEP}AUDIT-"
"""Prefix of the copies of chains that an audit makes: no Service's chain has such a name."""

_ALPHABET: Final = b"ABCDEFGHIJKLMNOPQRSTUVWXYZ234567".ljust(256)  # RFC 4648
_HASHED: Final = 10  # bytes of a digest that are used: 16 characters of five bits
_AT_ONCE: Final = 64


def _lower_halves(bits: int, lane: int) -> int:
    """Return a number of _AT_ONCE hashes, with the `bits` low bits set in every other lane of `lane` bits."""
    return sum(((1 << bits) - 1) << at for at in range(0, _AT_ONCE * 128, 2 * lane))


_HALVINGS: Final = tuple(
    (bits, lane, _lower_halves(bits, lane)) for bits, lane in ((40, 64), (20, 32), (10, 16), (5, 8))
)
"""The steps from 80 bits in each lane of 128 bits to five bits in each byte: each step halves all lanes."""

_PLAIN: Final = re.compile(r"[A-Za-z0-9./:_-]{0,200}")
_ODD: Final = re.compile(r"[^A-Za-z0-9./:_-]")


def chain_hashes(texts: Sequence[str]) -> list[str]:
    """Return for each text the first 16 characters of the base32 of its SHA-256.

    Ten hashes in one call cost a fifth of ten calls.
    """
    found: list[str] = []
    for start in range(0, len(texts), _AT_ONCE):
        some = texts[start : start + _AT_ONCE]
        digests = [sha256(text).digest()[:_HASHED] for text in _encoded(some)]
        bits = int.from_bytes(bytes(16 - _HASHED).join(digests), "big")
        for width, lane, mask in _HALVINGS:
            bits = (bits & mask) | ((bits >> width & mask) << lane)
        text = bits.to_bytes(16 * len(some), "big").translate(_ALPHABET).decode()
        found += [text[at : at + 16] for at in range(0, len(text), 16)]
    return found


def _encoded(texts: Sequence[str]) -> list[bytes]:
    try:
        return [text.encode() for text in texts]
    except UnicodeEncodeError:  # half of a surrogate pair, in a manifest
        return [text.encode(errors="surrogatepass") for text in texts]


def port_name(key: ServicePortKey) -> str:
    """Return a service port as the Go kube-proxy writes it: namespace/name:port, without the colon for no name."""
    return f"{key.namespace}/{key.name}:{key.port_name}" if key.port_name else f"{key.namespace}/{key.name}"


def comment(text: str) -> str:
    """Return a user's text, made safe for a quoted comment of a rule.

    Names that the API server accepts stay as they are. Others, as from a folder of manifests, lose the characters that
    could end the comment or the line, and are cut: iptables refuses comments above 255 bytes.
    """
    return text if _PLAIN.fullmatch(text) else _ODD.sub("_", text[:200])
