"""The window kept in frame order: by shifting it left through a copy, or by concatenating it anew on every pass."""
