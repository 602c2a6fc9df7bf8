"""Reads the kernel for one question: elements or rules of a Service, and the rules that a packet passes."""
