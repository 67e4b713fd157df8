"""The pure core: values in, values out. No sockets, no clock, no global state, no logging."""
