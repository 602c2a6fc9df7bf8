"""The meaning of rules: the outcome of any first packet of a connection in a ruleset of the kernel, and a comparison of
two rulesets for all packets. This code shares nothing with plans and renderers, so that it can verify plans and
renderers.
"""
