"""Sticky sessions: requests of one session go to one endpoint, for as long as it passes the filters."""

from picker.core.sticky.bindings import Binding, Bindings
from picker.core.sticky.sessions import SHARED, StickySessions, StickySettings, Store
from picker.core.sticky.source import Source, SourceType

__all__ = ["SHARED", "Binding", "Bindings", "Source", "SourceType", "StickySessions", "StickySettings", "Store"]
