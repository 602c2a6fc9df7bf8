"""The configuration: reads, completes and checks the command line and the KubeProxyConfiguration file; writes and
watches the file."""
