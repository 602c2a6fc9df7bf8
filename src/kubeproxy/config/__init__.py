"""The configuration: reads, completes, checks, writes and watches command line and KubeProxyConfiguration file."""
