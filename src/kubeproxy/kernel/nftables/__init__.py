"""nf_tables: rules, sets and chains as values, in nft's language and in netlink's."""
