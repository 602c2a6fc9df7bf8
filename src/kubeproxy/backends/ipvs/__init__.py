"""ipvs mode: virtual servers on kube-ipvs0, ipsets, and fixed iptables chains that match them."""

INTERFACE = "kube-ipvs0"
"""The dummy interface that carries the addresses of Services, so that their packets come in at all. Here, as every mode
leaves it out of the node's own addresses: the rest of this room is loaded when it is needed."""
