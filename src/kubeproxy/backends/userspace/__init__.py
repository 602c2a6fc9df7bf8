"""userspace mode: the proxy carries the bytes itself, and nftables brings connections to its listeners."""
