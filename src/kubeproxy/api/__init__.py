"""The two sources of objects: the client of the Kubernetes API, and the folder of manifests."""
