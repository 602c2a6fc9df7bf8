"""The meaning of rules: computes the outcome of a connection's first packet in a ruleset of the kernel, and compares
two rulesets for all packets. This code shares nothing with plans and renderers, so that it can verify both."""
