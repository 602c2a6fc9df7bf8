"""The interfaces of the kernel, without Kubernetes' terms."""
