"""A cluster of one node and its neighbours in network namespaces, for the demo, the tests and the benchmarks."""
