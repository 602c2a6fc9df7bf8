"""The sync loop: converts events to transactions of the backends, and reports the events and the transactions."""
