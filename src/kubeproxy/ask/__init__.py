"""Answers questions of operators from one Snapshot of a node, as values, text and JSON. Most code that reads the
kernel and /proc is in checks/, flows/ and kernel/."""
