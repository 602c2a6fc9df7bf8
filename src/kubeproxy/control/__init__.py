"""The unix socket by which commands query a running proxy. Only the socket's owner and root can open it."""
