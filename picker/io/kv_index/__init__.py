"""How block ownership travels between sidecars and pickers: Redis in Kthena's layout, and streams."""
