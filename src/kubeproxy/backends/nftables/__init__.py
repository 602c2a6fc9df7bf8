"""nftables mode: a ruleset whose chains and rules do not grow with the number of Services."""
