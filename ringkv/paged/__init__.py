"""Frames in pages of a shared pool, found through a block table: ``manager.PagedKVManager`` and its parts."""
