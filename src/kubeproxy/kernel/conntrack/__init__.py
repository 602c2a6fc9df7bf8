"""Connection tracking: entries, counters, events, and stale UDP flows."""
