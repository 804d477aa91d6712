"""The benchmark: how near each level comes to what the machine can do, from one process and interleaved samples.

``reads`` one call of attend against a bare attention call, ``peers`` the ring against other ways of keeping a window,
``frame`` the model's step against its bare kernels, ``rollout`` the main job, ``steady`` what must not change over a
long session. ``targets`` says what was wanted of each.
"""
