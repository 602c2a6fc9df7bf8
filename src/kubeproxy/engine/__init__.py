"""The sync loop: turns events into transactions of the backends, and reports both."""
