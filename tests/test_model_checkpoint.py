"""Checkpoints: what comes back, what is refused and how, and what a crash leaves."""

from __future__ import annotations

import dataclasses
import json
import struct

import pytest
import torch
from safetensors.torch import save_file

from model import checkpoint
from model.checkpoint import find_shipped, fingerprint, load_checkpoint, read_metadata, save_checkpoint
from model.transformer import FrameTransformer
from tests.model_tools import SMALL, OwnFrameOnly, random_actions, random_frames


@pytest.fixture
def saved(tmp_path):
    model = FrameTransformer(SMALL, seed=5)
    path = tmp_path / "weights.safetensors"
    save_checkpoint(path, model, data_hash="abc", steps=12)
    return path, model


def test_weights_come_back_bit_for_bit_and_give_the_same_frames(saved):
    path, model = saved
    loaded = load_checkpoint(path, SMALL, torch.float32)
    assert fingerprint(loaded) == fingerprint(model)
    outputs = []
    for each in (model, loaded):
        with torch.no_grad():
            outputs.append(
                each(random_frames(1), 0.9, random_actions(1), torch.tensor([3]), OwnFrameOnly(), commit=False)
            )
    assert torch.equal(*outputs)
    assert all(weight.requires_grad and not weight.is_meta for weight in loaded.parameters())


def test_the_dtype_is_the_callers_choice(saved, tmp_path):
    path, model = saved
    half = load_checkpoint(path, SMALL, torch.bfloat16)
    assert {weight.dtype for weight in half.parameters()} == {torch.bfloat16}
    save_checkpoint(tmp_path / "half.safetensors", half)
    again = load_checkpoint(tmp_path / "half.safetensors", SMALL, torch.float32)
    for name, weight in model.state_dict().items():
        assert torch.equal(again.state_dict()[name], weight.bfloat16().float())


def test_config_geometry_and_free_metadata_are_in_the_file(saved):
    path, _ = saved
    metadata = read_metadata(path)
    assert metadata["extra"] == {"data_hash": "abc", "steps": 12}
    assert metadata["weight_geometry"] == SMALL.weight_geometry()
    assert metadata["config"] == json.loads(json.dumps(dataclasses.asdict(SMALL)))


def test_what_tensor_shapes_do_not_depend_on_is_taken_from_the_caller(saved):
    path, _ = saved
    other = dataclasses.replace(SMALL, global_period=3, sigmas=(1.0, 0.0))
    assert load_checkpoint(path, other, torch.float32).config == other


@pytest.mark.parametrize(("key", "value"), [("channels", 3), ("num_actions", 18), ("num_kv_heads", 1)])
def test_weights_that_do_not_fit_are_refused_with_key_and_both_values(saved, key, value):
    path, _ = saved
    with pytest.raises(ValueError) as caught:
        load_checkpoint(path, dataclasses.replace(SMALL, **{key: value}), torch.float32)
    assert str(caught.value) == (
        f"checkpoint={path}: its weights have {key}={getattr(SMALL, key)}, the model has {key}={value}"
    )


def write_header(path, header, body=b""):
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + body)


DAMAGE = {
    "empty": lambda path: path.write_bytes(b""),
    "text": lambda path: path.write_text("these are not the weights you are looking for"),
    "cut in the weights": lambda path: path.write_bytes(path.read_bytes()[:-1]),
    "cut in the header": lambda path: path.write_bytes(path.read_bytes()[:100]),
    "too long": lambda path: path.write_bytes(path.read_bytes() + b"x"),
    "header is a list": lambda path: write_header(path, []),
    "header is not utf-8": lambda path: write_header(path, b"\xff\xfe"),
    "no offsets": lambda path: write_header(path, {"w": {"dtype": "F32"}}),
    "huge header": lambda path: path.write_bytes(struct.pack("<Q", 2**63)),
    "another program's": lambda path: save_file({"w": torch.zeros(2)}, path),
    "another program's metadata": lambda path: save_file({"w": torch.zeros(2)}, path, metadata={"model": "[1]"}),
}


@pytest.mark.parametrize("damage", DAMAGE.values(), ids=DAMAGE.keys())
def test_a_file_that_is_no_checkpoint_is_refused_in_one_line_that_names_it(saved, damage):
    path, _ = saved
    damage(path)
    for call in (read_metadata, lambda p: load_checkpoint(p, SMALL, torch.float32)):
        with pytest.raises(ValueError) as caught:
            call(path)
        assert str(caught.value).startswith(f"checkpoint={path}: ")
        assert "\n" not in str(caught.value)


def test_a_missing_file_is_said_to_be_missing(tmp_path):
    with pytest.raises(FileNotFoundError) as caught:
        read_metadata(tmp_path / "none.safetensors")
    assert str(caught.value) == f"checkpoint={tmp_path / 'none.safetensors'}: no such file"


def test_weights_that_contradict_their_own_geometry_are_refused_in_one_line(saved):
    path, model = saved
    text = json.dumps(read_metadata(path))
    tensors = {name: weight for name, weight in model.state_dict().items() if name != "value_mix"}
    save_file(tensors, path, metadata={"model": text})
    with pytest.raises(ValueError, match=r"cannot be loaded \(.*value_mix") as caught:
        load_checkpoint(path, SMALL, torch.float32)
    assert "\n" not in str(caught.value)


def test_a_save_that_fails_leaves_the_old_file_and_nothing_else(saved, monkeypatch):
    path, model = saved
    before = path.read_bytes()

    def write_half(tensors, target, metadata):
        target.write_bytes(b"half")
        raise OSError("disk full")

    monkeypatch.setattr("safetensors.torch.save_file", write_half)
    with pytest.raises(OSError, match="disk full"):
        save_checkpoint(path, model)
    assert path.read_bytes() == before
    assert [each.name for each in path.parent.iterdir()] == [path.name]


def test_metadata_that_is_not_json_is_refused_before_anything_is_written(tmp_path):
    model = FrameTransformer(SMALL)
    for bad in (object(), float("nan")):
        with pytest.raises((TypeError, ValueError)):
            save_checkpoint(tmp_path / "w.safetensors", model, data=bad)
    assert not list(tmp_path.iterdir())


def test_a_fingerprint_tells_names_shapes_dtypes_and_bytes_apart():
    model = FrameTransformer(SMALL, seed=1)
    prints = {fingerprint(model), fingerprint(FrameTransformer(SMALL, seed=2))}
    with torch.no_grad():
        model.head.bias[0] = -0.0  # equal to what it was, but not the same bytes
    prints.add(fingerprint(model))
    prints.add(fingerprint(model.bfloat16()))
    assert len(prints) == 4
    assert all(len(each) == 64 for each in prints)
    linear = torch.nn.Linear(2, 3, bias=False)
    other = torch.nn.Linear(3, 2, bias=False)
    with torch.no_grad():
        linear.weight.zero_()
        other.weight.zero_()
    assert fingerprint(linear) != fingerprint(other)


def test_shipped_weights_are_found_by_geometry_and_by_what_they_were_trained_on(tmp_path, monkeypatch):
    monkeypatch.setattr(checkpoint, "SHIPPED", tmp_path)
    assert find_shipped(SMALL, "pong") is None
    gray = FrameTransformer(SMALL)
    colour = FrameTransformer(dataclasses.replace(SMALL, channels=3))
    save_checkpoint(tmp_path / "a.safetensors", colour, data="pong")
    save_checkpoint(tmp_path / "b.safetensors", gray, data="freeway")
    save_checkpoint(tmp_path / "c.safetensors", gray, data="pong")
    save_checkpoint(tmp_path / "d.safetensors", gray)
    assert find_shipped(dataclasses.replace(SMALL, global_period=3), "pong") == tmp_path / "c.safetensors"
    assert find_shipped(SMALL, "freeway") == tmp_path / "b.safetensors"
    assert find_shipped(colour.config, "pong") == tmp_path / "a.safetensors"
    assert find_shipped(colour.config, "freeway") is None
    assert find_shipped(dataclasses.replace(SMALL, num_layers=2), "pong") is None


def test_weights_are_rounded_in_the_file_only_and_load_in_any_dtype(tmp_path):
    model = FrameTransformer(SMALL, seed=2)
    before = {name: weight.clone() for name, weight in model.state_dict().items()}
    save_checkpoint(tmp_path / "a.safetensors", model, dtype=torch.bfloat16)
    loaded = load_checkpoint(tmp_path / "a.safetensors", SMALL, torch.float32)
    for name, weight in model.state_dict().items():
        assert torch.equal(weight, before[name])
        assert torch.equal(loaded.state_dict()[name], weight.bfloat16().float())
