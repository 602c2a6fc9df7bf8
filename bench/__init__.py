"""Benchmarks of kube-proxy: each claim measured beside its physical limit, or beside a peer, in the same run.

Run with `python -m bench` from the repository's root, as root. docs/performance.md tells how to read the figures.
"""
