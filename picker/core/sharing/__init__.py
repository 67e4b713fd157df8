"""Pickers that know of each other's picks, so that several of them decide as one would."""
