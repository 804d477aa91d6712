"""The FlexAttention read path: every row reads its own span of a shared pool, with no decision on the host.

Letters: B rows, H_q query heads, H KV heads, G = H_q / H, T tokens of the frame, N tokens of the pool, C tokens of a
row's span, D head dim.

Two things say what a row sees. Block lists say which blocks of ``KV_BLOCK`` tokens a fused kernel visits; they are a
bound, for speed. The mask says which tokens count, and alone decides the result: an unfused call takes no notice of the
lists, so lists without a mask would be right in one kernel and read hidden tokens in the other.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from typing import Any

import torch

from ringkv.attention.paths import fold, unfold

KV_BLOCK = 128
"""Tokens of a block in the lists; a multiple of every tile that the fused kernels use."""

_QUERY_BLOCK = 128


def attend(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    start: torch.Tensor,
    visible: torch.Tensor,
    num_blocks: torch.Tensor,
    blocks: torch.Tensor,
) -> torch.Tensor:
    """Attention of q ``[B, H_q, T, D]`` over k and v ``[1, H, N, D]``; the result in the shape and dtype of q.

    start ``[B]`` int64 and visible ``[B, C]`` bool: row b sees token ``start[b] + i`` where ``visible[b, i]``, one at
    least. num_blocks ``[B]`` int32 and blocks ``[B, n]`` int32: the first ``num_blocks[b]`` entries are the blocks that
    hold a token that row b sees; the rest are any valid blocks.

    The kernel reads q in the pool's dtype, so that a pool is never converted. What is masked must be finite: its weight
    is an exact zero, and zero times NaN is NaN. Fused on an accelerator. On the CPU unfused and in fp64: slow, a
    reference for the masks.
    """
    from torch.nn.attention.flex_attention import BlockMask

    def row_sees(row: Any, head: Any, query: Any, token: Any) -> torch.Tensor:
        offset = token - start[row]
        inside = (offset >= 0) & (offset < visible.shape[1])
        return inside & visible[row, offset.clamp(0, visible.shape[1] - 1)]

    folded = fold(q, k.shape[1]).to(k.dtype)
    queries = folded.shape[2]
    # One block holds all queries of a row, because they all see the same.
    query_block = -(-queries // _QUERY_BLOCK) * _QUERY_BLOCK
    mask = BlockMask.from_kv_blocks(
        num_blocks[:, None, None],
        blocks[:, None, None],
        BLOCK_SIZE=(query_block, KV_BLOCK),
        mask_mod=row_sees,
        seq_lengths=(queries, k.shape[2]),
        compute_q_blocks=False,
    )
    return unfold(_flex_attention(q.device)(folded, k, v, block_mask=mask).to(q.dtype), q)


def _flex_attention(device: torch.device) -> Callable[..., torch.Tensor]:
    if torch.compiler.is_compiling():
        from torch.nn.attention.flex_attention import flex_attention

        return flex_attention
    return _unfused if device.type == "cpu" else _fused()


@functools.cache
def _fused() -> Callable[..., torch.Tensor]:
    from torch.nn.attention.flex_attention import flex_attention

    return torch.compile(flex_attention, fullgraph=True, dynamic=False)


def _unfused(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **kwargs: Any) -> torch.Tensor:
    from torch.nn.attention.flex_attention import flex_attention

    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="flex_attention called without torch.compile")
        return flex_attention(q.double(), k.double(), v.double(), **kwargs)
