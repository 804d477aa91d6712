"""What a run measures and leaves behind: meters, machine card, records, tracking, video, plots, tables."""
