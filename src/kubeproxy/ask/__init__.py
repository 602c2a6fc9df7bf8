"""Answers questions of operators from one Snapshot of a node, as values, text and JSON. Only checks/, flows/ and
kernel/ read the kernel and /proc."""
