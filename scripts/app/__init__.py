"""What the entry points share: knobs, their checks, one rollout, and sweeps of rollouts.

Nothing here imports torch at module level except ``build`` and ``job``, which are imported once a config has passed
its checks: bad input is refused before torch is loaded.
"""
