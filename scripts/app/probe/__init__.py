"""Probes with exact ground truth: what a way of keeping the past lets a model recall, and what it costs in quality."""
