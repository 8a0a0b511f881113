"""Fast tiers of a manager: local directories of hosts, copies on other hosts, the root later."""
