"""Entry points: the only place that joins ringkv, model and Hydra."""
