"""Names of models: what clients ask for, what engines serve, and the bodies that have to say the one or the other."""

from picker.core.models.body import ModelRestorer, model_of, replace_model
from picker.core.models.rewrites import ModelSettings, Rewrites, Rewritten

__all__ = ["ModelRestorer", "ModelSettings", "Rewrites", "Rewritten", "model_of", "replace_model"]
