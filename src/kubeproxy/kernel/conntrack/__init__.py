"""Connection tracking: its entries, its counts, its announcements, and stale UDP flows."""
