"""A Kubernetes API server in memory, for the lab. Its answers follow recordings of a real kube-apiserver 1.36.

`rest` implements the semantics without sockets, `server` the HTTP side; `store` stores the objects and reports changes.
"""
