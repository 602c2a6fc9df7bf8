"""A kernel of its own for what this machine's lacks: the guest, and the conformance cases played in it."""
