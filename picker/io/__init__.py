"""Adapters between the core and the world, each thin and replaceable."""
