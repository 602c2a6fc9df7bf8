"""The model of Services: Kubernetes objects, and the plans that follow from them. Pure: no clock, sockets, subprocesses
or logging."""
