"""The meaning of rules: computes the outcome of a connection's first packet in a ruleset of the kernel, and compares
two rulesets for all packets. This package shares no code with plans and renderers, and can therefore verify both."""
