"""iptables of both variants: rules, locks, and which variant a node uses."""
