"""The configuration: command line and KubeProxyConfiguration file, read, defaulted, checked, written and watched."""
