"""How the kernel is spoken to. Nothing here knows Kubernetes."""
