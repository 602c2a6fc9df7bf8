"""Random histories of a cluster, with faults around the proxy; a model checks the results.

Uses the lab and the shared code of the tests (`support`); docs/reliability.md describes the histories. Not in the
wheel."""
