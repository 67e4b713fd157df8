"""Names of models: what clients ask for, what engines serve, and the bodies that have to say the one or the other."""

from picker.core.models.body import ModelRestorer, replace_model
from picker.core.models.rewrites import ModelSettings, Rewrites

__all__ = ["ModelRestorer", "ModelSettings", "Rewrites", "replace_model"]
