"""A cluster in network namespaces, with one node and its neighbours, for the demo, the tests and the benchmarks."""
