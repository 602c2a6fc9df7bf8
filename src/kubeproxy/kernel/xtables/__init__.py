"""iptables of both variants: rules, locks, and the variant that a node uses."""
