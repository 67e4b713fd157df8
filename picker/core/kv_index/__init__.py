"""What a sidecar knows of its engine's blocks, how it tells others, and what a picker makes of it."""
