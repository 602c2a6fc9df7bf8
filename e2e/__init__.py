"""Upstream's end-to-end tests on a real cluster of two nodes on one machine: `python -m e2e`, as root.

All processes and files are in network namespaces whose names begin with `kpe2e-` and in one folder; the machine's own
network is not changed. docs/conformance.md shows the results.
"""
