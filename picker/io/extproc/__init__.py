"""Envoy's external-processing service: messages to events, effects to messages, and the decision in between."""
