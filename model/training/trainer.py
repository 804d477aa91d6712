"""The training loop's state: weights, their average, optimizers and the number of the next step.

A state is one safetensors file; with it a run goes on bit for bit, given the same data, build of torch and number of
threads, because a step's batch follows from its number.
"""

from __future__ import annotations

import copy
import dataclasses
import json
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from model.config import ModelConfig
from model.layers import patchify
from model.training.batches import draw_batch, loss, with_own_history
from model.training.footage import FootageSource
from model.training.optimizer import optimizers, set_rates
from model.training.recipe import Recipe
from model.training.sequence import SequenceModel
from model.transformer import FrameTransformer
from ringkv.files import replaced_atomically

_KEY = "training"


@torch.no_grad()
def start_from(model: FrameTransformer, background: torch.Tensor, gain: float) -> None:
    """Make the background ``[C, H, W]`` invisible to new weights, and what they predict on average.

    The embedding of a clean frame becomes that of its difference to the background, ``gain`` times larger beside the
    position embeddings. A small object on a bright field is otherwise a small part of every token's norm.
    """
    patches = patchify(background[None].to(model.patch_in.weight), model.config.patch)[0]
    model.patch_in.weight.mul_(gain)
    model.position.sub_(model.patch_in(patches))
    model.head.bias.copy_(patches.mean(dim=0))


class Trainer:
    """Trains a ``FrameTransformer`` by a recipe. model: the weights as stepped; average: as kept and served."""

    def __init__(self, recipe: Recipe, config: ModelConfig, source: FootageSource) -> None:
        """``ValueError`` for footage that the model does not fit."""
        recipe.check()
        self.recipe, self.source, self.step = recipe, source, 0
        self.background = source.background()
        self.model = FrameTransformer(config, recipe.seed)
        if recipe.start_gain and self.background is not None:
            start_from(self.model, self.background, recipe.start_gain)
        self.average = copy.deepcopy(self.model).requires_grad_(False)
        products = torch.bfloat16 if recipe.bf16 else None
        self._sequences, self._served = SequenceModel(self.model, products), SequenceModel(self.average, products)
        self._muon, self._adamw = optimizers(self.model, recipe)

    def advance(self) -> dict[str, float]:
        """One step; its loss, the norm of the gradient before clipping, and the factor on the rates."""
        recipe, step = self.recipe, self.step
        batch = draw_batch(recipe, self.model.config, self.source, self.background, step)
        sequences = with_own_history(batch, self._served)
        value = loss(self._sequences(sequences, batch.layers), batch)
        for optimizer in (self._muon, self._adamw):
            optimizer.zero_grad()
        value.backward()
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), recipe.clip)
        if not bool(torch.isfinite(norm)):
            raise FloatingPointError(f"step {step}: the gradient is not finite")
        set_rates(self._muon, self._adamw, recipe, step)
        self._muon.step()
        self._adamw.step()
        # The average begins as the weights themselves and then forgets ever more slowly.
        decay = min(recipe.ema, (1 + step) / (10 + step))
        torch._foreach_lerp_(list(self.average.parameters()), list(self.model.parameters()), 1 - decay)
        self.step += 1
        return {
            "loss": value.item(),
            "gradient_norm": norm.item(),
            "rate": recipe.rate(step),
            "ring_frames": batch.layers[0].ring_frames,
            "frames": batch.target.shape[1],
        }

    def save(self, path: str | Path) -> None:
        """Write the state atomically: the old file or the new one, never a part."""
        with replaced_atomically(path) as temporary:
            save_file(self._tensors(), temporary, metadata={_KEY: json.dumps(self._facts())})

    def load(self, path: str | Path) -> None:
        """Go on from the state in ``path``.

        ``FileNotFoundError``, or ``ValueError`` with one line if it is not a training state, or of another recipe,
        model or data. Nothing has changed then.
        """
        if not Path(path).is_file():
            raise FileNotFoundError(f"{path}: no such file")
        try:
            with safe_open(path, framework="pt") as file:
                facts: dict[str, Any] = json.loads((file.metadata() or {})[_KEY])
                tensors = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118 (a file, not a dict)
        except (SafetensorError, OSError, KeyError, ValueError) as error:
            raise ValueError(f"{path}: not a training state ({error!r})") from error
        for key, mine in self._facts().items():
            if key != "step" and facts.get(key) != mine:
                raise ValueError(f"{path}: saved with {key}={facts.get(key)}; this run has {mine}")
        with torch.no_grad():
            for name, tensor in self._tensors().items():
                tensor.copy_(tensors[name])
        self.step = facts["step"]

    def _tensors(self) -> dict[str, torch.Tensor]:
        """Everything that a step changes, by name; the tensors themselves."""
        tensors: dict[str, torch.Tensor] = {}
        for part, model in (("model", self.model), ("average", self.average)):
            tensors |= {f"{part}.{name}": tensor for name, tensor in model.state_dict().items()}
        for name, weight in self.model.named_parameters():
            state = self._muon.state.get(weight) or self._adamw.state[weight]
            tensors |= {f"{key}.{name}": tensor for key, tensor in state.items()}
        return tensors

    def _facts(self) -> dict[str, Any]:
        config = json.loads(json.dumps(dataclasses.asdict(self.model.config)))
        return {
            "step": self.step,
            "recipe": dataclasses.asdict(self.recipe),
            "model": config,
            "data_hash": self.source.data_hash,
        }
