"""Proof by machines: random histories of a cluster, and of what goes wrong around a proxy, judged by a model.

Uses the lab and what the tests share (`support`); docs/reliability.md says what is tried. Not in the wheel.
"""
