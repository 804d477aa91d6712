"""The reference model: a frame transformer that keeps its past in a ``ringkv`` resource. Importing it loads no torch.

Read in this order: ``config``, ``rope``, ``layers``, ``attention``, ``transformer``, ``sampler``; then ``oracle``,
which recomputes what they serve without a cache, and ``checkpoint``.
"""
