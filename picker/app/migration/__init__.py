"""Configurations of other routers, read as they are and put into the picker's own shape."""
