"""Processes, modules, sysctls, files and sockets: the kernel's interfaces other than netlink."""
