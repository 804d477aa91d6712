"""The read paths themselves: ``canonical``, ``masked`` and ``segments``. See the package docstring for the letters.

Each folds the G query heads that read one KV head into one longer list of queries, ``[1, H, G * T, D]``: the same
products, but one pass over the keys in place of G. K and V in another dtype than q are read in q's dtype, so a cache
may store less precision than the model computes in.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F

# SDPA's own kernel, called for the log-sum-exp that SDPA keeps to itself. Resolved once: a look-up costs at every call.
_flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default


def fold(q: torch.Tensor, kv_heads: int) -> torch.Tensor:
    """``[B, H_q, T, D]`` as ``[B, H, G * T, D]``, a view if that can be; query head h belongs to KV head ``h // G``."""
    folded = q.reshape(q.shape[0], kv_heads, -1, q.shape[3])
    # The CPU's flash kernel takes the last axis to be dense without looking at its stride.
    return folded if folded.stride(-1) == 1 else folded.contiguous()


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


def masked(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
    """One call over a span of the cache. mask: ``[n]``, None hides nothing.

    Bool, False hides; or what is added to the scores, in q's dtype, as which SDPA would rewrite a bool one in every
    call. The span must hold finite values everywhere: a masked weight is an exact zero, and zero times NaN is NaN.
    """
    bias = None if mask is None else mask[None, None, None, :]
    out = F.scaled_dot_product_attention(fold(q, k.shape[1]), k.to(q.dtype), v.to(q.dtype), attn_mask=bias)
    return unfold(out, q)


def segments(q: torch.Tensor, keys: Sequence[torch.Tensor], values: Sequence[torch.Tensor]) -> torch.Tensor:
    """One unmasked call per contiguous segment, joined by log-sum-exp in fp32 (fp64 for fp64 inputs). CPU only.

    With out_s and lse_s of segment s, the joint softmax of a and b is ``out_a + w (out_b - out_a)`` with
    ``w = sigmoid(lse_b - lse_a)``, and its log-sum-exp that of both; further segments join in turn. Hidden keys are
    never read.
    """
    if len(keys) == 1:
        return masked(q, keys[0], values[0], None)
    if q.requires_grad and torch.is_grad_enabled():  # the kernel's log-sum-exp carries no gradient
        return masked(q, torch.cat(tuple(keys), dim=2), torch.cat(tuple(values), dim=2), None)
    folded = fold(q, keys[0].shape[1])
    parts = [_flash(folded, k.to(q.dtype), v.to(q.dtype)) for k, v in zip(keys, values, strict=True)]
    (out, lse), *others = parts  # [B, H, G * T, D] and [B, H, G * T]
    out = out.to(lse.dtype)
    while others:
        part, part_lse = others.pop(0)
        out = torch.lerp(out, part.to(lse.dtype), torch.sigmoid(part_lse - lse)[..., None])
        if others:
            lse = torch.logaddexp(lse, part_lse)
    return unfold(out.to(q.dtype), q)
