"""Reads the kernel for one question: its elements or rules of a Service, and the rules that a packet passes."""
