"""Disruptions of the real cluster under steady traffic: what each one costs clients of Services."""
