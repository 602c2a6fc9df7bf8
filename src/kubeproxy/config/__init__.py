"""The configuration: reads, completes, checks, writes and watches the command line and the KubeProxyConfiguration
file."""
