"""Disruptions of the real cluster under steady traffic: the failed requests of clients of Services in each one."""
