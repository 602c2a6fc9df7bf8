"""kube-proxy for Linux nodes, in Python. docs/architecture.md describes the packages ("rooms"), and a change from the
event to the kernel."""
