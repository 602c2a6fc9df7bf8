"""Connection tracking: its entries, its counts, and what it announces."""
