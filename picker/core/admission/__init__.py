"""Whether a request may go to an endpoint now: how full the pool is, who can be turned away, and who waits for a turn."""
