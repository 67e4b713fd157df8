"""Choosing an endpoint: filters remove candidates, producers match the prompt, scorers rate, the pick follows."""
