"""The base of every part of the configuration: frozen, by keyword only, with Kubernetes' names in JSON."""

from __future__ import annotations

from msgspec import Struct

_ACRONYMS = {
    "cluster_cidr": "clusterCIDR",
    "exclude_cidrs": "excludeCIDRs",
    "strict_arp": "strictARP",
    "enable_dsr": "enableDSR",
}


def json_name(name: str) -> str:
    """The name in JSON of an attribute."""
    first, *others = name.split("_")
    return _ACRONYMS.get(name) or first + "".join(word.capitalize() for word in others)


class ConfigStruct(Struct, rename=json_name, frozen=True, kw_only=True):
    """Common settings of every part of the configuration."""
