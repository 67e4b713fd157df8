"""Transports that carry RPC services: our own HTTP/2 server, and grpcio."""
