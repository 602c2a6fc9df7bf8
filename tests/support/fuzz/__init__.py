"""Coverage-guided fuzzing of all parsers of external bytes: one target for each parser, and the checks of its
behaviour.

`make fuzz` generates new inputs for the targets; tests/unit/test_fuzzing.py replays those of tests/recordings/fuzz.
"""
