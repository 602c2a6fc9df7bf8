"""The sync loop: turns events into transactions of the backends, and reports the events and the transactions."""
