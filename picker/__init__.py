"""picker: an Envoy external-processing endpoint picker for LLM inference."""

__version__ = "0.1.0"
