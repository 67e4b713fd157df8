"""Traffic replayed in simulated time through the real scheduler, against simulated engines. Pure: no I/O, no clock."""
