"""nf_tables' rules, sets and chains as values: from nft's language, to netlink and back, and to nft's language."""
