"""Generates histories from a seed: changes of Services, slices, Nodes and ServiceCIDRs, and faults.

Some of the objects are junk (support.junk), with separate names. A seed always makes the same history.
"""

from __future__ import annotations

from collections.abc import Callable

from prove.aimed import Aimed
from prove.dumps import COMPARED
from prove.steps import Json, Step, copied
from support.junk import ENDPOINTS, GOOD_PORT, SERVICES, SLICES, SPECS

CALLS = ("die-before", "die-after", "ENOBUFS", "EPERM", "ENOMEM", "EINTR", "no-memory", "clock-back", "clock-ahead")
"""Faults at one of the calls into the kernel."""


BEGINNINGS = (0, 2, 3, 5)
"""The number of Services at the beginning of a history."""


class Generator(Aimed):
    """Makes one history."""

    def __init__(self, seed: str, mode: str) -> None:
        super().__init__(seed)
        self.seed = seed
        self.mode = mode
        self._favours: list[float] = []

    def history(self, length: int) -> list[Step]:
        """Return about `count` steps: some are applied together, with quiet moments between them."""
        for _ in range(self.random.choice(BEGINNINGS)):  # with fewer objects most steps would find nothing to change
            self._new()
        if self.mode in COMPARED:
            self._aim(self.seed)
        length += len(self.made)
        while len(self.made) < length:
            for _ in range(self.random.choice((1, 3, 8, 15))):
                self._step()
            self.made.append(("quiet",))
        return self.made

    def _step(self) -> None:
        weights: tuple[tuple[int, Callable[[], None]], ...] = (
            (18, self._new),
            (26, self._change),
            (24, self._endpoints),
            (10, self._swap),
            (8, self._remove),
            (5, self._remove_slices),
            (4, self._move),
            (4, self._junk),
            (3, self._node),
            (3, self._service_cidr),
            (8, self._api),
            (14, self._away),
            (3, self._spoil),
            (5, self._proxy),
            (2, self._other_mode),
            (4, self._harm),
            (2, lambda: self.made.append(("look",))),
        )
        if not self._favours:
            # Each history has a few kinds of steps often, and no others, so that it finds the effects of their
            # combination sooner.
            self._favours = [self.random.choice((0.2, 1, 1, 4)) for _ in weights]
        shares = [favour * weight for favour, (weight, _) in zip(self._favours, weights, strict=True)]
        self.random.choices([act for _, act in weights], shares)[0]()

    # -- other steps
    # ------------------------------------------------------------------------------------------------------

    def _junk(self) -> None:
        """Return an invalid object with a name that no valid object has."""
        name = f"junk-{self._next()}"
        metadata = self._metadata("default", name)
        address = self._cluster_ip("IPv4")
        spec: Json = {"type": "ClusterIP", "clusterIP": address, "clusterIPs": [address], "ports": [GOOD_PORT]}
        service: Json = {"metadata": metadata, "spec": spec | {"ipFamilies": ["IPv4"]}, "status": {}}
        endpoint: Json = {"addresses": ["a1"], "conditions": {"ready": True}, "nodeName": "node-a"}
        labels = {"kubernetes.io/service-name": name}
        piece: Json = {"metadata": metadata | {"name": f"{name}-1", "labels": labels}, "addressType": "IPv4"}
        piece |= {"endpoints": [endpoint], "ports": [{"name": "web", "port": 3000, "protocol": "TCP"}]}
        where = self.random.choice(("spec", "service", "endpoint", "slice"))
        if where == "spec":
            service["spec"] |= self.random.choice(list(SPECS.values())).part
        elif where == "service":
            service |= self.random.choice(list(SERVICES.values())).part
        elif where == "endpoint":
            piece["endpoints"] = [endpoint, self.random.choice(list(ENDPOINTS.values())).part]
        else:
            piece |= self.random.choice(list(SLICES.values())).part
        self.made += [("put", "services", service), ("put", "endpointslices", piece)]
        if self.random.random() < 0.7:
            self.made.append(("remove", "services", "default", name))

    def _spoil(self) -> None:
        """A part of an existing Service or slice becomes invalid; the other parts must still work."""
        if not self.services:
            return
        usable = [bad.part for bad in SPECS.values() if bad.works]
        name = self.random.choice(list(self.services))
        service = copied(self.services[name])
        service["spec"] |= copied(self.random.choice(usable))
        self.made.append(("put", "services", service))
        mine = [p for k, p in self.slices.items() if k[0] == name[0]]
        if mine:
            piece = copied(self.random.choice(mine))
            piece["endpoints"] = [*piece["endpoints"], self.random.choice(list(ENDPOINTS.values())).part]
            self.made.append(("put", "endpointslices", piece))

    def _node(self) -> None:
        if self.random.random() < 0.3:
            self.made.append(("no_node",))
        self.made.append(("zone", self.random.choice(("zone-a", "zone-b", ""))))

    def _service_cidr(self) -> None:
        name = self.random.choice(("more", "most"))
        if self.random.random() < 0.4:
            self.made.append(("remove", "servicecidrs", "", name))
        else:
            cidrs = self.random.sample(("10.97.0.0/16", "10.96.128.0/17", "fd00:10:97::/112"), 2)
            metadata = {"name": name, "uid": f"cidr-{name}"}
            self.made.append(("put", "servicecidrs", {"metadata": metadata, "spec": {"cidrs": cidrs}}))

    def _api(self) -> None:
        number = self.random.choice((1, 1, 3))
        faults: Json = {self.random.choice(("cut_watch", "gone", "garbage_watch", "fail", "reset")): number}
        if "fail" in faults:
            faults["fail_code"] = self.random.choice((401, 403, 410, 429, 500, 503))
        if self.random.random() < 0.3:
            faults |= {"fail_watch_list": self.random.random() < 0.5, "delay": self.random.choice((0.0, 0.0, 0.02))}
        choices: list[Step] = [
            ("api", faults),
            ("api", faults),
            ("again",),
            ("compact",),
            ("backup",),
            ("restore",),
            ("rollback",),
            ("elsewhere",),
        ]
        choices += [("drop",), ("api", {"stall_watch": True})]
        self.made.append(self.random.choice(choices))

    def _away(self) -> None:
        """The API server is unreachable while objects change, and may have lost its history afterwards."""
        self.made.append(("away", self.random.random() < 0.7))
        acts = (self._new, self._change, self._endpoints, self._swap, self._remove, self._move, self._service_cidr)
        for _ in range(self.random.choice((2, 3, 6))):
            self.random.choice(acts)()
        if self.random.random() < 0.15:
            self._proxy()
        self.made.append(("back",))

    def _proxy(self) -> None:
        pause = ("pause", self.random.choice((0.1, 0.1, 0.5, 0.5, 3.0)))
        word = self.random.choice((*CALLS, *CALLS, "die-turn", "die-turn", "short-reads"))
        most = {"die-turn": 600, "short-reads": 50}.get(word, 250)
        faulty = ("faulty", word, self.random.randrange(1, most))
        starve = ("starve", self.random.choice(("memory", "descriptors", "disk")), self.random.choice((0.3, 1.0)))
        choices: list[Step] = [("kill",), ("restart",), pause, self._configured(), faulty, faulty, starve]
        self.made.append(self.random.choice(choices))

    def _configured(self) -> Step:
        fields = self.random.choice(
            (
                {},
                {"masqueradeAll": True},
                {"nodePortAddresses": ["192.168.0.0/16", "fd00:100::/64"]},
                {"nodePortAddresses": ["0.0.0.0/0", "::/0"]},
                {"detectLocalMode": "BridgeInterface", "detectLocal": {"bridgeInterface": "cbr0"}},
            )
        )
        flags = ("--reset-gone-endpoints", "--connection-counters") if self.mode == "nftables" else ()
        return ("configure", fields, [flag for flag in flags if self.random.random() < 0.4])

    def _other_mode(self) -> None:
        """Change to another mode and back; all modes of this host except iptables-legacy, because then no hint selects
        it."""
        if self.mode == "nftables":
            self.made += [("switch", self.random.choice(("iptables-nft", "iptables-nft", "userspace")))]
            for _ in range(self.random.choice((0, 1, 4))):
                self.random.choice((self._new, self._change, self._endpoints, self._remove))()
            if self.random.random() < 0.5:
                self.made.append(("quiet",))
            self.made.append(("switch", "nftables"))

    def _harm(self) -> None:
        words = ("flush", "delete", "stray", "element", "flush-chain")
        steps: list[Step] = [("harm", self.random.choice(words)), ("harm", self.random.choice(words))]
        if self.mode == "nftables":
            steps.append(("foreign", self.random.choice(("nft", "iptables"))))
        if self.mode.startswith("iptables"):
            steps += [("foreign", "nft"), ("lock", self.random.choice((0.1, 0.5, 2.0)))]
        self.made.append(self.random.choice(steps))
