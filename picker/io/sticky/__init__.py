"""Sticky sessions that several pickers share."""
