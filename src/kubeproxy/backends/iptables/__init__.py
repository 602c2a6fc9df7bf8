"""iptables mode: plans to the chains and rules of the Go kube-proxy, and those to iptables-restore."""
