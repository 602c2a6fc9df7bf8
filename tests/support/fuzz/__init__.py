"""Coverage-guided fuzzing of what reads bytes from others: a target for each kind, and what is held against it.

`make fuzz` feeds the targets new inputs; tests/unit/test_fuzzing.py feeds them those of tests/recordings/fuzz again.
"""
