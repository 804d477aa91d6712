"""The bytes ledger: what a generated frame writes and reads of K and V, layer by layer. No clock is involved.

A dispatch mode sees every operator that a resource runs. It follows K and V by the storage that they lie in:

* The ``k`` and ``v`` handed to ``attend`` are K and V.
* What a copying operator (``clone``, ``cat``, ``index_select``, a change of dtype, ...) makes of them is K and V in a
  fresh tensor, and what one writes them into (``copy_``, ``index_copy_``) is from then on a cache buffer.
* A view lies in the storage that it is a view of.
* What attention makes of them is an output or a score, not K or V; nor is anything else that was not copied from them.

Since a cache starts out with nothing, all K and V that it will ever hold came in through ``attend``; following them
from the first frame on misses none and takes nothing else for them. An operator that touches K or V and is neither
known to copy nor known to attend raises ``RuntimeError``: the ledger does not guess.

Counted are writes to a storage that holds K and V, zeroing included, and fresh tensors, each by the bytes produced;
allocating is not a write. Read are the operands of attention, whole, masked tokens included, and the sources of copies;
the incoming ``k`` and ``v`` are the model's and are not counted as read. Inside an operator nothing is seen. A
*registered* operator of ours is therefore counted by running its Python body under the mode, never by what it declares.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from ringkv.config import KVConfig
from ringkv.resource import AttentionResource
from ringkv.ring import ops
from ringkv.step import FrameStep, StepContext

_aten = torch.ops.aten

BODIES: Mapping[Any, Callable[[torch.Tensor], Callable[..., None]]] = {
    ops.ring_write: lambda buffer: ops.write_on_host if buffer.is_cpu else ops.write_on_device
}
"""Registered operators and their bodies, chosen by the first argument."""

COPIES = {_aten.clone, _aten._to_copy, _aten.cat, _aten.stack, _aten.index_select, _aten.index, _aten.gather}
"""Operators whose result holds the elements of their operands."""

WRITES: Mapping[Any, Callable[..., int]] = {
    _aten.copy_: lambda target, *_: target.numel(),
    _aten.fill_: lambda target, *_: target.numel(),
    _aten.zero_: lambda target, *_: target.numel(),
    _aten.index_copy_: lambda target, dim, index, source: source.numel(),
}
"""Operators that overwrite their first argument, and how many elements of it."""

ATTENTION = {
    _aten._scaled_dot_product_flash_attention_for_cpu,
    _aten._scaled_dot_product_flash_attention,
    _aten._scaled_dot_product_efficient_attention,
    _aten._scaled_dot_product_cudnn_attention,
}
"""Operators that only read K and V."""

ALLOCATIONS = {_aten.empty_like, _aten.zeros_like, _aten.new_empty, _aten.new_zeros}
"""Operators that take shape, dtype and device of K or V, and no element."""


@dataclass(frozen=True)
class LayerBytes:
    """What one generated frame moved in one layer, over all its passes.

    frame_writes: ``bytes_written`` in units of one frame's K and V, whatever the dtype they were written in.
    """

    frame_writes: float
    bytes_written: int
    bytes_read: int


@dataclass
class _Place:
    """A storage that holds K and V. layer: the one that it was last seen in. incoming: it is the model's own."""

    reference: StorageWeakRef  # keeps the address from being taken for another storage's once this one is gone
    layer: int
    incoming: bool


@dataclass
class _Tally:
    elements_written: int = 0
    bytes_written: int = 0
    bytes_read: int = 0


class BytesLedger(TorchDispatchMode):
    """Counts under ``with``. ``attending`` says which layer runs and what its K and V are."""

    def __init__(self, config: KVConfig) -> None:
        super().__init__()
        self._frame_elements = 2 * config.num_kv_heads * config.tokens_per_frame * config.head_dim
        self._places: dict[int, _Place] = {}
        self._layer: int | None = None
        self._tallies = [_Tally() for _ in range(config.num_layers)]

    def restart(self) -> None:
        """Count from zero. Where K and V lie stays known, except in storages that have been freed since."""
        self._tallies = [_Tally() for _ in self._tallies]
        self._places = {key: place for key, place in self._places.items() if not place.reference.expired()}

    def totals(self) -> list[LayerBytes]:
        """What was counted so far, per layer."""
        return [
            LayerBytes(tally.elements_written / self._frame_elements, tally.bytes_written, tally.bytes_read)
            for tally in self._tallies
        ]

    @contextlib.contextmanager
    def attending(self, layer_idx: int, k: torch.Tensor, v: torch.Tensor) -> Iterator[None]:
        """Around a call of ``attend``. Outside, an operator belongs to the layer that its K and V were last seen in."""
        for tensor in (k, v):
            self._remember(tensor, layer_idx, incoming=True)
        self._layer = layer_idx
        try:
            yield
        finally:
            self._layer = None

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in BODIES:
            with self:
                return BODIES[func](args[0])(*args, **kwargs)
        result = func(*args, **kwargs)
        operands = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        sources = [operand for operand in operands if self._place(operand) is not None]
        if sources:
            self._count(func, args, sources, [leaf for leaf in tree_leaves(result) if isinstance(leaf, torch.Tensor)])
        return result

    def _count(
        self, func: Any, args: tuple[Any, ...], sources: list[torch.Tensor], results: list[torch.Tensor]
    ) -> None:
        """Enter one operator, ``sources`` being those of its operands that hold K or V."""
        packet, layer = func.overloadpacket, self._layer_of(sources)
        if func._schema.is_mutable:
            if packet not in WRITES:
                raise RuntimeError(f"{func} changes a tensor beside or of K or V in a way that the ledger cannot count")
            target, elements = args[0], WRITES[packet](*args)
            self._wrote(target, elements, layer)
            for source in (source for source in sources if source is not target):
                self._read(source, elements, layer)
        elif packet in ATTENTION:
            for source in sources:
                self._read(source, source.numel(), layer)
        elif packet in ALLOCATIONS:
            pass
        elif all(self._place(result) is not None for result in results if result.is_floating_point()):
            pass  # a view, or nothing that could be K or V
        elif packet in COPIES:
            (fresh,) = results
            self._wrote(fresh, fresh.numel(), layer)
            for source in sources:
                self._read(source, min(source.numel(), fresh.numel()), layer)
        else:
            raise RuntimeError(f"{func} makes something of K or V, and the ledger does not know whether it is a copy")

    def _wrote(self, tensor: torch.Tensor, elements: int, layer: int) -> None:
        self._tallies[layer].elements_written += elements
        self._tallies[layer].bytes_written += elements * tensor.element_size()
        self._remember(tensor, layer, incoming=False)

    def _read(self, tensor: torch.Tensor, elements: int, layer: int) -> None:
        place = self._place(tensor)
        assert place is not None
        if not place.incoming:
            self._tallies[layer].bytes_read += elements * tensor.element_size()

    # -- where K and V lie -------------------------------------------------------------------------------------

    def _layer_of(self, sources: list[torch.Tensor]) -> int:
        if self._layer is not None:
            return self._layer
        layers = {place.layer for place in map(self._place, sources) if place is not None}
        if len(layers) != 1:
            raise RuntimeError(f"an operator outside attend touches K or V of layers {sorted(layers)} at once")
        return layers.pop()

    def _place(self, tensor: torch.Tensor) -> _Place | None:
        return self._places.get(tensor.untyped_storage()._cdata)

    def _remember(self, tensor: torch.Tensor, layer: int, *, incoming: bool) -> None:
        reference = StorageWeakRef(tensor.untyped_storage())
        self._places[reference.cdata] = _Place(reference, layer, incoming)


def measure_frame(resource: AttentionResource, *, frame: int, denoise_passes: int = 4) -> list[LayerBytes]:
    """What ``resource`` moves per layer to generate frame ``frame``; see ``measure_frames``."""
    (layers,) = measure_frames(resource, frames=[frame], denoise_passes=denoise_passes)
    return layers


@torch.no_grad()
def measure_frames(
    resource: AttentionResource, *, frames: Sequence[int], denoise_passes: int = 4
) -> list[list[LayerBytes]]:
    """What ``resource`` moves per layer to generate each of ``frames``: its denoise passes and the committing one.

    frames: ascending; those before and between them take the committing pass alone. A session is driven from frame 0
    with K and V of the cache's dtype, and given back afterwards. What happens in ``admit``, ``plan`` and ``commit``
    counts too. ``RuntimeError`` if a frame is refused.
    """
    config, rid = resource.config, "bytes ledger"
    shape = (config.tokens_per_frame, config.head_dim)

    def zeros(heads: int) -> torch.Tensor:
        return torch.zeros(1, heads, *shape, dtype=resource.dtype, device=resource.device)

    ledger, measured = BytesLedger(config), []
    resource.ingest_request(rid)
    try:
        for clock in range(frames[-1] + 1):
            step, ctx = FrameStep(frames=((rid, clock),)), StepContext(request_ids=(rid,))
            frame_pos = torch.tensor([clock], dtype=torch.int64, device=resource.device)
            passes = denoise_passes if clock in frames else 0
            ledger.restart()
            with ledger:
                outcome = resource.admit(step, ctx)
                if not outcome.ok:
                    raise RuntimeError(f"step refused: {outcome.reason}")
                resource.plan(step, ctx)
                for index in range(passes + 1):
                    for layer in range(config.num_layers):
                        q, k, v = zeros(config.num_qo_heads), zeros(config.num_kv_heads), zeros(config.num_kv_heads)
                        with ledger.attending(layer, k, v):
                            resource.attend(q, k, v, layer, frame_pos, commit=index == passes)
                resource.commit(step, ctx)
            if clock in frames:
                measured.append(ledger.totals())
    finally:
        resource.remove_request(rid)
    return measured
