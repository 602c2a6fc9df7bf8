"""Answers questions of operators from one Snapshot of a node: as values, text and JSON. checks/, flows/ and kernel/
also read the kernel and /proc; all other modules are pure.
"""
