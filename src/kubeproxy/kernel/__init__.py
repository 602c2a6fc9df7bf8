"""Access to the kernel, independent of Kubernetes."""
