"""Connection tracking: entries, counts, events, and stale UDP flows."""
