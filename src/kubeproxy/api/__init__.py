"""Both sources of objects: a client of the Kubernetes API, and a reader of a folder of manifests."""
