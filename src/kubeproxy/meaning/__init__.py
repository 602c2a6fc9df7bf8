"""The meaning of rules: the outcome of any first packet of a connection in a ruleset of the kernel, and a comparison of
two rulesets for all packets. It shares no code with plans and renderers, so that it can verify them.
"""
