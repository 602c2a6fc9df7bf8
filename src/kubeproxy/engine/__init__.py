"""The sync loop: events in, transactions of the backends out, and what it reports of both."""
