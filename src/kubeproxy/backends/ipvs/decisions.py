"""What our chains decide, in words: for who reads a trace of the kernel's."""

from kubeproxy.backends.chain_decisions import decision

__all__ = ["decision"]
