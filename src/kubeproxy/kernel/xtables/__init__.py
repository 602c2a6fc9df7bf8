"""iptables in both variants: rules, locks, and detection of the variant in use."""
