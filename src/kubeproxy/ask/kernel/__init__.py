"""Reads the kernel for one question: what it holds of a Service, and which rules a packet meets."""
