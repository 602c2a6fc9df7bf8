"""Benchmarks of kube-proxy: each compares a figure with its physical limit, or with a peer, in the same run.

Run with `python -m bench` from the repository's root, as root. docs/performance.md explains the figures.
"""
