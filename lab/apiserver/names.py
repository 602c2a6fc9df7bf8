"""Checks of names with the rules of Kubernetes. Pure. Source: apimachinery's util/validation (RFC 1035, 1123, 6335)."""

from __future__ import annotations

import random
import re

_LABEL = re.compile(r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?")
_LABEL_1035 = re.compile(r"[a-z]([-a-z0-9]{0,61}[a-z0-9])?")
_SUBDOMAIN = re.compile(r"[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*")
_PORT_NAME = re.compile(r"[a-z0-9]([a-z0-9-]*[a-z0-9])?")
_SUFFIX_LETTERS = "bcdfghjklmnpqrstvwxz2456789"

DNS_LABEL_MESSAGE = (
    "a lowercase RFC 1123 label must consist of lower case alphanumeric characters or '-', and must start and end "
    "with an alphanumeric character (e.g. 'my-name',  or '123-abc', regex used for validation is "
    "'[a-z0-9]([-a-z0-9]*[a-z0-9])?')"
)
DNS_1035_MESSAGE = (
    "a DNS-1035 label must consist of lower case alphanumeric characters or '-', start with an alphabetic character, "
    "and end with an alphanumeric character (e.g. 'my-name',  or 'abc-123', regex used for validation is "
    "'[a-z]([-a-z0-9]*[a-z0-9])?')"
)
SUBDOMAIN_MESSAGE = (
    "a lowercase RFC 1123 subdomain must consist of lower case alphanumeric characters, '-' or '.', and must start "
    "and end with an alphanumeric character (e.g. 'example.com', regex used for validation is "
    "'[a-z0-9]([-a-z0-9]*[a-z0-9])?(\\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*')"
)


def dns_label(name: str) -> bool:
    """RFC 1123 label."""
    return _LABEL.fullmatch(name) is not None


def dns_1035(name: str) -> bool:
    """Return whether a name is an RFC 1035 label, like names of Services."""
    return _LABEL_1035.fullmatch(name) is not None


def dns_subdomain(name: str) -> bool:
    """Return whether a name is an RFC 1123 subdomain, like most names."""
    return len(name) <= 253 and _SUBDOMAIN.fullmatch(name) is not None


def port_name_error(name: str) -> str:
    """Return the reason why this is no port name (RFC 6335), '' for a valid name."""
    if not 1 <= len(name) <= 15:
        return "must be no more than 15 characters"
    if not _PORT_NAME.fullmatch(name):
        return "must contain only alpha-numeric characters (a-z, 0-9), and hyphens (-)"
    if not re.search("[a-z]", name):
        return "must contain at least one letter (a-z)"
    return "must not contain consecutive hyphens" if "--" in name else ""


def generated(prefix: str) -> str:
    """Return a name from metadata.generateName: the shortened prefix, and five letters without vowels, which form no
    words."""
    return prefix[:58] + "".join(random.choices(_SUFFIX_LETTERS, k=5))
