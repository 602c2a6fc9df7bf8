"""kube-proxy for Linux nodes, in Python. See docs/architecture.md for the rooms and the way of a change."""
