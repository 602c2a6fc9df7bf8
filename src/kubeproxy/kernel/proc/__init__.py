"""Processes, modules, sysctls, files and sockets: what a kernel shows outside netlink."""
