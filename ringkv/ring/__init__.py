"""The ring: a fixed horizon of frame slots per layer, overwritten in place, for many resident sessions."""
