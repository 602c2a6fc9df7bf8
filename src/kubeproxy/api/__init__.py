"""What comes in: the Kubernetes API client, and the manifest folder. Nothing here knows what a Service means."""
