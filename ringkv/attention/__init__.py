"""Read paths: attention over the visible frames of a batch row, given as tensors.

Nothing here knows where a frame is stored. A strategy hands over views of its own buffers, in frame order for
``canonical``, in any order for the fast reads (softmax does not care about the order of keys).

Letters: H_q query heads, H KV heads, G = H_q / H query heads per KV head, T tokens of the frame, N visible tokens,
D head dim. q is ``[B, H_q, T, D]``, keys and values are ``[B, H, n, D]``, for B rows that see as many tokens each.
"""
