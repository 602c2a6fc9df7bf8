"""The model of Services: Kubernetes objects, and the plans that follow from them. Pure: no clock, socket or logging."""
