"""The report of runs, comparisons, horizon maps and probes: one page that needs nothing from outside, and its files."""
