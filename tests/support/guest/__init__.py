"""Runs a separate kernel for features that this machine's kernel lacks: the guest, and the conformance cases in it."""
