"""ipvs mode: virtual servers on kube-ipvs0, ipsets, and fixed iptables chains that match them."""
