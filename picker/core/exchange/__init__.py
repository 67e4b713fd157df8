"""One ext_proc stream as a sans-IO state machine: events in, effects out."""
