"""Objects and their plans. The model of Services: pure, without clock, sockets, subprocesses and logging."""
