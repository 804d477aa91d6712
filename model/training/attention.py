"""Attention of every frame of a sequence to itself and to its own part of a clean history, without masks.

A frame's visible history is a few whole frames, so there is nothing to mask inside a product: each group of frames with
a common history takes one unmasked call over exactly those keys, all frames take one more over themselves, and the two
are joined by log-sum-exp. One masked score matrix would be bound by memory and hold mostly hidden scores.

Letters: B sequences, F frames of queries, N frames of history, K tokens per frame, H query heads, G KV heads, D head
dim.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F

_flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_flash_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


class HistoryGroup(NamedTuple):
    """Query frames ``first`` to ``last`` (exclusive), which see the same frames ``seen`` of the history, ascending."""

    first: int
    last: int
    seen: Sequence[int]


def history_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    history_k: torch.Tensor,
    history_v: torch.Tensor,
    groups: Sequence[HistoryGroup],
) -> torch.Tensor:
    """What every query frame reads: itself (k, v at its own place) and the history frames of its group.

    q: ``[B, F, H, K, D]``; k, v: ``[B, F, G, K, D]``; history_k, history_v: ``[B, N, G, K, D]``. Returns
    ``[B, F, H, K, D]``. Softmax scale ``D ** -0.5``, as in the cache. A query frame in no group sees itself only.
    """
    shared = q.shape[2] // k.shape[2]
    if shared > 1:
        k, v, history_k, history_v = (x.repeat_interleave(shared, dim=2) for x in (k, v, history_k, history_v))
    if q.is_cpu:
        return _Grouped.apply(q, k, v, history_k, history_v, groups)
    return _masked(q, k, v, history_k, history_v, groups)


class _Grouped(torch.autograd.Function):
    """Flash attention group by group; see the module's docstring.

    The backward pass of each call needs no more than the joint output and log-sum-exp: with P = exp(S - lse), the
    probabilities of the joint softmax, dS = P * (dP - rowsum(dO * O)) holds for any subset of the keys.
    """

    @staticmethod
    def forward(
        ctx: Any,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        history_k: torch.Tensor,
        history_v: torch.Tensor,
        groups: Sequence[HistoryGroup],
    ) -> torch.Tensor:
        own_out, own_lse = _flash(*(x.flatten(0, 1) for x in (q, k, v)))
        tokens = q.shape[3]
        queries, keys, values = _by_head(q), _by_head(history_k), _by_head(history_v)
        out = _by_head(own_out.view(q.shape))
        lse = own_lse.view(q.shape[:-1]).transpose(1, 2).flatten(2)
        for group in groups:
            if not group.seen:
                continue
            rows = slice(group.first * tokens, group.last * tokens)
            part, part_lse = _flash(
                queries[:, :, rows], _frames(keys, group.seen, tokens), _frames(values, group.seen, tokens)
            )
            joint = torch.logaddexp(lse[:, :, rows], part_lse)
            out[:, :, rows] *= (lse[:, :, rows] - joint).exp_()[..., None]
            out[:, :, rows] += part * (part_lse - joint).exp_()[..., None]
            lse[:, :, rows] = joint
        ctx.save_for_backward(q, k, v, queries, keys, values, out, lse)
        ctx.groups = groups
        return _by_frame(out, tokens)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
        q, k, v, queries, keys, values, out, lse = ctx.saved_tensors
        tokens = q.shape[3]
        own_lse = lse.unflatten(2, (-1, tokens)).transpose(1, 2).flatten(0, 1).contiguous()
        own = (grad, q, k, v, _by_frame(out, tokens))
        grad_q, grad_k, grad_v = _flash_backward(*(x.flatten(0, 1) for x in own), own_lse, 0.0, False)
        grads = _by_head(grad)
        grad_queries, grad_keys, grad_values = (torch.zeros_like(x) for x in (queries, keys, values))
        for group in ctx.groups:
            if not group.seen:
                continue
            rows = slice(group.first * tokens, group.last * tokens)
            dq, dk, dv = _flash_backward(
                grads[:, :, rows],
                queries[:, :, rows],
                _frames(keys, group.seen, tokens),
                _frames(values, group.seen, tokens),
                out[:, :, rows],
                lse[:, :, rows],
                0.0,
                False,
            )
            grad_queries[:, :, rows] = dq
            _add_frames(grad_keys, group.seen, tokens, dk)
            _add_frames(grad_values, group.seen, tokens, dv)
        grad_q = grad_q.view(q.shape) + _by_frame(grad_queries, tokens)
        own_grads = grad_k.view(k.shape), grad_v.view(v.shape)
        return grad_q, *own_grads, _by_frame(grad_keys, tokens), _by_frame(grad_values, tokens), None


def _by_head(x: torch.Tensor) -> torch.Tensor:
    """``[B, F, H, K, D]`` to contiguous ``[B, H, F * K, D]``."""
    return x.transpose(1, 2).flatten(2, 3).contiguous()


def _by_frame(x: torch.Tensor, tokens: int) -> torch.Tensor:
    """``[B, H, F * K, D]`` to contiguous ``[B, F, H, K, D]``."""
    return x.unflatten(2, (-1, tokens)).transpose(1, 2).contiguous()


def _is_run(frames: Sequence[int]) -> bool:
    return frames[-1] - frames[0] == len(frames) - 1


def _frames(x: torch.Tensor, frames: Sequence[int], tokens: int) -> torch.Tensor:
    """The tokens of some frames of ``[B, H, N * K, D]``; a view where the frames adjoin."""
    if _is_run(frames):
        return x[:, :, frames[0] * tokens : (frames[-1] + 1) * tokens]
    return x.unflatten(2, (-1, tokens))[:, :, list(frames)].flatten(2, 3)


def _add_frames(x: torch.Tensor, frames: Sequence[int], tokens: int, grad: torch.Tensor) -> None:
    """Add ``grad`` to those tokens in place."""
    if _is_run(frames):
        x[:, :, frames[0] * tokens : (frames[-1] + 1) * tokens] += grad
    else:
        index = torch.tensor(frames, device=x.device)
        x.unflatten(2, (-1, tokens)).index_add_(2, index, grad.unflatten(2, (-1, tokens)))


def _masked(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    history_k: torch.Tensor,
    history_v: torch.Tensor,
    groups: Sequence[HistoryGroup],
) -> torch.Tensor:
    """The same in one masked call, for devices where many small calls cost more than hidden scores."""
    frames, tokens, past = q.shape[1], q.shape[3], history_k.shape[1]
    visible = torch.zeros(frames, past + frames, dtype=torch.bool)
    visible[:, past:].fill_diagonal_(True)
    for group in groups:
        visible[group.first : group.last, list(group.seen)] = True
    mask = visible.to(q.device).repeat_interleave(tokens, 0).repeat_interleave(tokens, 1)
    keys = torch.cat([_by_head(history_k), _by_head(k)], dim=2)
    values = torch.cat([_by_head(history_v), _by_head(v)], dim=2)
    return _by_frame(F.scaled_dot_product_attention(_by_head(q), keys, values, attn_mask=mask), tokens)
