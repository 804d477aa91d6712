"""Read paths: attention over one batch row's visible frames, given as tensors.

Nothing here knows where a frame is stored. A strategy hands over views of its own buffers, in frame order for
``canonical``, in any order for the fast reads (softmax does not care about the order of keys).

Letters: H_q query heads, H KV heads, G = H_q / H query heads per KV head, T tokens of the frame, N visible tokens,
D head dim. One row at a time: q is ``[1, H_q, T, D]``, keys and values are ``[1, H, n, D]``.
"""
