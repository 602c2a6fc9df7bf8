"""The sync loop: events in, transactions of the backends out, and reports on both."""
