"""Engines' KV events from their ZMQ sockets."""
