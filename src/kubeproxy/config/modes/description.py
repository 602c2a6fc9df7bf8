"""What the configuration says of one proxy mode: which blocks count in it, which flags set them, what can be wrong.

A mode's own block is a struct beside its description, and a field of KubeProxyConfiguration. Nothing here knows how a
mode programs the kernel: that is in kubeproxy.backends, in the folder of the mode's name.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from collections.abc import Set as AbstractSet
from typing import Any, Literal, Protocol, TypeVar

from msgspec import Struct

from kubeproxy.config.durations import Duration
from kubeproxy.config.fields import ConfigurationFields
from kubeproxy.config.messages import Mistake
from kubeproxy.config.struct import json_name

C = TypeVar("C", bound=ConfigurationFields)

LoopbackNodePorts = Literal["never", "ipv4", "relayed"]
"""Whether loopback may be among the addresses that NodePorts answer on: never, for IPv4, or by a relay of the proxy."""

EVERY_ADDRESS = ("0.0.0.0/0", "::/0")
PRIMARY_ADDRESS = ("primary",)
NODEPORT_WORDS = {
    "primary": PRIMARY_ADDRESS,
    "localhost": ("127.0.0.0/8", "::1/128"),
    "all": EVERY_ADDRESS,
}
"""What nodePortAddresses may say besides networks; the node's own addresses are known only when it runs.

Kubernetes 1.37 (KEP-6032) has all of them, in any mixture; 1.36 has `primary` alone.
"""


def spelled_out(addresses: Iterable[str]) -> tuple[str, ...]:
    """NodePort addresses with networks in place of words, but for the one whose meaning is not known yet."""
    return tuple([network for part in addresses for network in NODEPORT_WORDS.get(part, (part,))])


class SyncBlock(Protocol):
    """A block that says how often a mode syncs."""

    @property
    def sync_period(self) -> Duration:
        """The longest time between two looks at everything."""

    @property
    def min_sync_period(self) -> Duration:
        """The least time between two syncs."""


class MasqueradeBlock(Protocol):
    """A block that says what a mode masquerades."""

    @property
    def masquerade_bit(self) -> int:
        """The bit of the mark of packets to masquerade."""

    @property
    def masquerade_all(self) -> bool:
        """Whether all traffic to cluster IPs is."""


class ModeConfig(Struct, frozen=True, kw_only=True):
    """One mode. The methods have the usual answers; a mode that has others overrides them.

    `syncs` and `masquerades` are the blocks, by their field of KubeProxyConfiguration, that hold the mode's sync
    periods and its masquerade settings. `flags` are flags that mean other fields in other modes, with the paths that
    they set in this one; `flag_defaults` are values of such flags that count although they are not given.
    `unset_when_empty` are paths of the mode's own block where 0 counts as unset.
    `nodeport_addresses` is what an unset nodePortAddresses means.
    """

    name: str
    syncs: str
    masquerades: str
    flags: Mapping[str, tuple[str, ...]]
    flag_defaults: Mapping[str, Any] = {}
    unset_when_empty: frozenset[str] = frozenset()
    nodeport_addresses: tuple[str, ...] = EVERY_ADDRESS

    def sync_block(self, config: ConfigurationFields) -> SyncBlock:
        """The block with the mode's sync periods."""
        block: SyncBlock = getattr(config, self.syncs)
        return block

    def masquerade_block(self, config: ConfigurationFields) -> MasqueradeBlock:
        """The block with the mode's masquerade settings."""
        block: MasqueradeBlock = getattr(config, self.masquerades)
        return block

    def path(self, config: ConfigurationFields, attribute: str) -> str:  # noqa: ARG002 - see nftables
        """The JSON path where the user wrote an attribute of the sync block."""
        return f"{self.syncs}.{json_name(attribute)}"

    def mistakes(self, config: ConfigurationFields) -> Iterator[Mistake]:  # noqa: ARG002 - as most modes
        """What is wrong with the mode's own settings, when it is the one to run."""
        yield from ()

    def completed(self, config: C, given: AbstractSet[str]) -> C:  # noqa: ARG002
        """The configuration for this mode when `mode` is empty; given names the fields (JSON paths) that are set."""
        return config

    def loopback_nodeports(self, config: ConfigurationFields) -> LoopbackNodePorts:  # noqa: ARG002 - see iptables
        """Whether NodePorts may answer on loopback addresses."""
        return "never"
