"""Questions of operators and their answers, as values, text and JSON, from one Snapshot of a node. checks/, flows/ and
kernel/ also read the kernel and /proc for an answer; all other modules are pure.
"""
