"""What the picker remembers of its own picks: which prompt bytes were sent where."""
