"""The read paths themselves: ``canonical``, ``masked`` and ``segments``. See the package docstring for the letters.

Each folds the G query heads that read one KV head into one longer list of queries, ``[1, H, G * T, D]``: the same
products, but one pass over the keys in place of G. K and V in another dtype than q are read in q's dtype, so a cache
may store less precision than the model computes in.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F


def fold(q: torch.Tensor, kv_heads: int) -> torch.Tensor:
    """``[1, H_q, T, D]`` as contiguous ``[1, H, G * T, D]``; query head h belongs to KV head ``h // G``."""
    rows, _, _, head_dim = q.shape
    # Contiguous, because the CPU's flash kernel takes the last axis to be dense without looking at its stride.
    return q.reshape(rows, kv_heads, -1, head_dim).contiguous()


def unfold(out: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
    """Undo ``fold``: ``out`` in the shape of ``q``."""
    return out.reshape(q.shape)


def canonical(q: torch.Tensor, keys: Sequence[torch.Tensor], values: Sequence[torch.Tensor]) -> torch.Tensor:
    """Attention over ``keys`` and ``values``, one chunk per frame in frame order, gathered into one contiguous tensor.

    Slow and beyond doubt: what is not visible is not there, and two strategies that hold the same frames hand over the
    same bytes, so their outputs are equal bit for bit.
    """
    k = torch.cat([chunk.to(q.dtype) for chunk in keys], dim=2)
    v = torch.cat([chunk.to(q.dtype) for chunk in values], dim=2)
    return unfold(F.scaled_dot_product_attention(fold(q, k.shape[1]), k, v), q)


def masked(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, visible: torch.Tensor | None) -> torch.Tensor:
    """One call over a span of the cache; ``visible`` ``[n]`` bool hides what must not be seen, None hides nothing.

    The span must hold finite values everywhere: a masked weight is an exact zero, and zero times NaN is NaN.
    """
    mask = None if visible is None else visible[None, None, None, :]
    out = F.scaled_dot_product_attention(fold(q, k.shape[1]), k.to(q.dtype), v.to(q.dtype), attn_mask=mask)
    return unfold(out, q)


def segments(q: torch.Tensor, keys: Sequence[torch.Tensor], values: Sequence[torch.Tensor]) -> torch.Tensor:
    """One unmasked call per contiguous segment, joined by log-sum-exp in fp32 (fp64 for fp64 inputs). CPU only.

    With out_s and lse_s of segment s, the joint softmax is ``sum_s exp(lse_s - lse) out_s``, ``lse`` being the
    log-sum-exp over the segments; hidden keys are never read.
    """
    if len(keys) == 1:
        return masked(q, keys[0], values[0], None)
    folded = fold(q, keys[0].shape[1])
    parts = [
        torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(folded, k.to(q.dtype), v.to(q.dtype))
        for k, v in zip(keys, values, strict=True)
    ]
    lses = torch.stack([lse for _, lse in parts])  # [S, 1, H, G * T]
    weights = torch.softmax(lses, dim=0)[..., None]
    out = weights[0] * parts[0][0]
    for weight, (part, _) in zip(weights[1:], parts[1:], strict=True):
        out = torch.addcmul(out, weight, part.to(weight.dtype))
    return unfold(out.to(q.dtype), q)
