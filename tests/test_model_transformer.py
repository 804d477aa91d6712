"""The frame transformer: positions, dtypes, heads, modulation table, and the compiled regions."""

from __future__ import annotations

import copy
import dataclasses
import math

import pytest
import torch

from model.attention import before_attend
from model.layers import MAX_TABLES, patchify, rms_norm, unpatchify
from model.rope import rotate, rotation
from model.transformer import FrameTransformer, compile_regions
from ringkv import FrameStep, StepContext
from tests.model_tools import SMALL, OwnFrameOnly, random_actions, random_frames, ring_for

ONE_TOKEN = dataclasses.replace(
    SMALL, tokens_per_frame=1, num_layers=1, num_heads=1, num_kv_heads=1, head_dim=8, global_period=2
)
FIRST_T_ELEMENT = 2  # of a head of 8: pair 0 turns with x, pair 1 with y, pairs 2 and 3 with t, pair 2 by t radians


def clocks(*values):
    return torch.tensor(values, dtype=torch.int64)


def begin(ring, rid, frame):
    step, ctx = FrameStep(frames=((rid, frame),)), StepContext(request_ids=(rid,))
    assert ring.admit(step, ctx).ok
    ring.plan(step, ctx)
    return step, ctx


def one_pass(model, resource=None, *, rows=2, sigma=0.75, first_clock=0, dtype=torch.float32):
    frames, actions = random_frames(rows).to(dtype), random_actions(rows)
    resource = resource or OwnFrameOnly()
    with torch.no_grad():
        return model(frames, sigma, actions, torch.arange(rows) + first_clock, resource, commit=False)


# -- positions -----------------------------------------------------------------------------------------------


def turned_unit(frame, dtype=torch.float32):
    """A key (1, 0) of the pair that turns by ``frame`` radians, [1, 1, 1, 8]."""
    unit = torch.zeros(1, 1, 1, 8)
    unit[..., FIRST_T_ELEMENT] = 1
    return rotate(unit, *rotation(clocks(frame), (1, 1), 8, torch.float32)).to(dtype)


def test_scores_depend_on_age_alone_for_ever_and_a_stored_key_is_never_turned_again():
    """The fault: phases taken from the slot, or from the number of kept rows, go wrong after the wrap."""
    ring = ring_for(ONE_TOKEN)
    ring.ingest_request("a")
    stored = {}
    for frame in range(101):
        step = begin(ring, "a", frame)
        key = turned_unit(frame)
        keys, _, visible = ring.upsert(key, key, 0, clocks(frame), commit=True)
        ring.commit(*step)
        if frame >= 2:
            scores = sorted((key[0, 0] @ keys[0, 0, visible].T)[0].tolist())
            assert scores == pytest.approx([math.cos(2), math.cos(1), 1.0], abs=1e-4)
        stored[frame] = key
        for slot in range(3):
            held = max((f for f in range(frame + 1) if f % 3 == slot), default=None)
            if held is not None:
                assert torch.equal(ring.layers[0].kv[0, 0, :, slot], stored[held][0, :, 0])


def test_neighbouring_clocks_beyond_256_keep_their_own_angle_in_a_bf16_cache():
    """The fault: integers above 256 are not exact in bf16, so frames 256 and 257 collapse."""
    ring = ring_for(ONE_TOKEN, dtype=torch.bfloat16)
    ring.ingest_request("a")
    component = {}
    for frame in range(260):
        step = begin(ring, "a", frame)
        key = turned_unit(frame, torch.bfloat16)
        ring.upsert(key, key, 0, clocks(frame), commit=True)
        ring.commit(*step)
        component[frame] = ring.layers[0].kv[0, 0, 0, frame % 3, FIRST_T_ELEMENT].item()
    assert [component[frame] for frame in (256, 257, 258)] == pytest.approx([-0.0398, 0.8203, 0.9258], abs=5e-5)
    assert [frame % 3 for frame in range(255, 260)] == [0, 1, 2, 0, 1]


@pytest.mark.parametrize("frame", [255, 256, 257, 258, 259, 100_003])
def test_a_bf16_model_turns_its_keys_by_the_integer_clock(frame):
    """Casting a model must not cast its positions: keys stay where an fp64 model with the same weights puts them."""
    model = FrameTransformer(SMALL, seed=1).to(torch.bfloat16)
    exact = copy.deepcopy(model).double()
    low, high = OwnFrameOnly(), OwnFrameOnly()
    one_pass(model, low, rows=1, first_clock=frame)
    one_pass(exact, high, rows=1, first_clock=frame, dtype=torch.float64)
    k, expected = low.calls[0][1], high.calls[0][1]
    assert k.dtype == torch.bfloat16
    assert (k - expected).abs().max() <= 0.03 * expected.abs().max()
    elsewhere = OwnFrameOnly()
    one_pass(exact, elsewhere, rows=1, first_clock=frame + 1, dtype=torch.float64)
    assert (k - elsewhere.calls[0][1]).abs().max() > 0.2 * expected.abs().max()


def test_x_y_and_t_turn_disjoint_parts_of_the_head():
    cos, sin = rotation(clocks(0, 5), (2, 3), 32, torch.float64)
    assert cos.shape == (2, 1, 6, 16)
    angle = torch.atan2(sin, cos)[:, 0]
    x, y, t = angle.split([4, 4, 8], dim=-1)
    assert torch.equal(x[0], x[1])
    assert torch.equal(y[0], y[1])
    assert x[0, :, 0].tolist() == pytest.approx([0, 1, 2, 0, 1, 2])
    assert y[0, :, 0].tolist() == pytest.approx([0, 0, 0, 1, 1, 1])
    assert torch.equal(t[0], torch.zeros(6, 8, dtype=torch.float64))
    assert t[1, 0].tolist() == pytest.approx([(5 * 100 ** (-j / 8) + math.pi) % math.tau - math.pi for j in range(8)])


def test_angles_are_rounded_once_and_late():
    """An fp32 angle of 10**8 + 1 radians is off by 1, and so is an fp32 clock; cos and sin must be right."""
    cos, _ = rotation(clocks(10**8 + 1), (1, 1), 8, torch.float32)
    assert cos.dtype == torch.float32
    assert cos[0, 0, 0, FIRST_T_ELEMENT].item() == pytest.approx(math.cos(10**8 + 1), abs=1e-6)


def test_a_rotation_keeps_lengths():
    heads = torch.randn(2, 3, 6, 32, generator=torch.Generator().manual_seed(0))
    turned = rotate(heads, *rotation(clocks(3, 900), (2, 3), 32, torch.float32))
    assert turned.is_contiguous()
    torch.testing.assert_close(turned.norm(dim=-1), heads.norm(dim=-1))


# -- parts ---------------------------------------------------------------------------------------------------


def test_patches_are_row_major_and_come_back_whole():
    frames = torch.arange(2 * 3 * 4 * 6.0).view(2, 3, 4, 6)
    patches = patchify(frames, 2)
    assert patches.shape == (2, 6, 12)
    assert torch.equal(patches[1, 4].view(3, 2, 2), frames[1, :, 2:4, 2:4])
    assert torch.equal(unpatchify(patches, 2, (2, 3)), frames)


def test_a_frame_first_seen_in_inference_mode_can_be_trained_through():
    model = FrameTransformer(SMALL, seed=1)
    with torch.inference_mode():
        one_pass(model)
    frames, actions = random_frames(2), random_actions(2)
    model(frames, 0.75, actions, torch.arange(2), OwnFrameOnly(), commit=False).sum().backward()
    assert all(block.qkv_weight.grad is not None for block in model.blocks)


def test_a_norm_raises_precision_to_fp32_and_never_lowers_it():
    x = torch.full((4,), 300.0)  # its square overflows fp16
    assert rms_norm(x.half()).dtype == torch.float32
    assert rms_norm(x.half()).tolist() == pytest.approx([1.0] * 4)
    assert rms_norm(x.bfloat16()).dtype == torch.float32
    assert rms_norm(x.double()).dtype == torch.float64


def test_queries_read_kv_heads_in_groups_not_in_turn():
    """The fault: KV heads tiled 0, 1, 0, 1 where queries expect 0, 0, 1, 1."""
    ring = ring_for(dataclasses.replace(SMALL, num_layers=1))
    ring.ingest_request("a")
    begin(ring, "a", 0)
    d, heads = SMALL.d_model, SMALL.num_heads
    modulation = torch.zeros(1, 6, d)
    modulation[:, 0], modulation[:, 1] = 1.0, -1.0  # shift 1, scale of 1 + -1: every token enters as ones
    qkv_weight = torch.randn((heads + 2 * SMALL.num_kv_heads) * SMALL.head_dim, d)
    qkv_weight[-2 * SMALL.head_dim : -SMALL.head_dim] = 1 / d
    qkv_weight[-SMALL.head_dim :] = -1 / d
    q, k, v = before_attend(
        torch.randn(1, SMALL.tokens_per_frame, d),
        modulation,
        *rotation(clocks(0), SMALL.grid, SMALL.head_dim, torch.float32),
        torch.zeros(1, SMALL.num_kv_heads, SMALL.tokens_per_frame, SMALL.head_dim),
        torch.tensor(0.0),
        qkv_weight,
        torch.zeros(heads),
    )
    assert torch.equal(q, torch.zeros_like(q))
    out = ring.attend(q, k, v, 0, clocks(0), commit=True)
    assert out[0, :, 0, 0].tolist() == pytest.approx([1, 1, -1, -1])


def test_every_layer_attends_exactly_once_in_order_and_says_whether_it_commits():
    model, resource = FrameTransformer(SMALL), OwnFrameOnly()
    model(random_frames(1), 0.0, random_actions(1), clocks(4), resource, commit=True)
    model(random_frames(1), 1.0, random_actions(1), clocks(4), resource, commit=False)
    assert [(layer, commit) for *_, layer, commit in resource.calls] == [
        (layer, commit) for commit in (True, False) for layer in range(SMALL.num_layers)
    ]


def test_later_layers_mix_in_the_values_of_layer_zero():
    model, resource = FrameTransformer(SMALL, seed=1), OwnFrameOnly()
    with torch.no_grad():
        model.value_mix.copy_(torch.tensor([1.0, 0.0, 1.0]))
    one_pass(model, resource)
    values = [v for _, _, v, *_ in resource.calls]
    assert torch.equal(values[1], values[0])
    assert not torch.equal(values[2], values[0])
    assert torch.equal(values[3], values[0])


# -- dtypes --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
def test_k_and_v_reach_the_cache_in_one_dtype_contiguous_and_frames_come_back_in_at_least_fp32(dtype):
    """The fault: keys came out of the rotation in fp32 while values and cache were 16-bit."""
    resource = OwnFrameOnly()
    out = one_pass(FrameTransformer(SMALL).to(dtype), resource, dtype=dtype)
    for q, k, v, *_ in resource.calls:
        assert (q.dtype, k.dtype, v.dtype) == (dtype, dtype, dtype)
        assert all(each.is_contiguous() for each in (q, k, v))
    assert out.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    assert out.isfinite().all()


def test_autocast_gives_the_cache_one_dtype_and_leaves_the_modulation_table_alone():
    model, resource = FrameTransformer(SMALL, seed=1), OwnFrameOnly()
    with torch.autocast("cpu", torch.bfloat16):
        cast = one_pass(model, resource)
    assert {each.dtype for q, k, v, *_ in resource.calls for each in (q, k, v)} == {torch.bfloat16}
    assert cast.dtype == torch.float32
    plain = one_pass(model)
    assert torch.equal(plain, one_pass(FrameTransformer(SMALL, seed=1)))  # the table that autocast left is exact
    assert (cast - plain).abs().max() < 0.1 * plain.abs().max()


def test_a_bf16_model_stays_close_to_the_same_weights_in_fp64():
    model = FrameTransformer(SMALL, seed=1).to(torch.bfloat16)
    exact = one_pass(copy.deepcopy(model).double(), dtype=torch.float64)
    assert (one_pass(model) - exact).abs().max() < 0.05 * exact.abs().max()


def test_casting_the_model_leaves_a_ring_that_it_uses_as_it_was():
    """The fault: casting a model also cast its masks and indices."""
    model, ring = FrameTransformer(SMALL), ring_for(SMALL, dtype=torch.bfloat16)
    ring.ingest_request("a")
    step = begin(ring, "a", 0)
    model.to(torch.bfloat16)
    with torch.no_grad():
        model(random_frames(1), 0.0, random_actions(1), clocks(0), ring, commit=True)
    ring.commit(*step)
    ring.check_integrity()
    assert all(layer.written.dtype == torch.bool and layer.kv.dtype == torch.bfloat16 for layer in ring.layers)
    assert not list(model.buffers())  # nothing but weights, so nothing else that a cast could reach


# -- initial weights -----------------------------------------------------------------------------------------


def test_initial_weights_come_from_the_seed_alone():
    first = FrameTransformer(SMALL, seed=3).state_dict()
    torch.manual_seed(99)
    again, other = FrameTransformer(SMALL, seed=3).state_dict(), FrameTransformer(SMALL, seed=4).state_dict()
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert not torch.equal(first["blocks.0.qkv_weight"], other["blocks.0.qkv_weight"])
    assert set(first["conditioning.bias"].view(4, 6, 32).amax((0, 2)).tolist()) == {0.0, 0.5}
    assert (first["value_mix"].tolist(), first["blocks.0.temperature"].tolist()) == ([0.5] * 3, [2.0] * 4)


# -- modulation table ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("shared", [False, True])
def test_the_modulation_table_is_bit_equal_to_computing_a_row(shared):
    conditioning = FrameTransformer(dataclasses.replace(SMALL, shared_modulation=shared), seed=1).conditioning
    with torch.no_grad():
        for sigma in SMALL.sigmas:
            table = conditioning.table(sigma)
            assert table.shape == (SMALL.num_layers, SMALL.num_actions, 6, SMALL.d_model)
            for action in range(SMALL.num_actions):
                row = conditioning(torch.tensor([sigma], dtype=torch.float64), clocks(action))
                assert torch.equal(table[:, action], row[:, 0])
            assert conditioning.table(sigma) is table


def test_the_modulation_table_follows_the_weights():
    model = FrameTransformer(SMALL, seed=1)

    def fresh(sigma=0.75):
        with torch.no_grad():
            rows = [model.conditioning(torch.tensor([sigma], dtype=torch.float64), clocks(a)) for a in range(3)]
        return torch.cat(rows, dim=1)

    before = model.conditioning.table(0.75)
    with torch.no_grad():
        model.conditioning.bias.add_(1)
    assert torch.equal(model.conditioning.table(0.75), fresh())
    assert not torch.equal(model.conditioning.table(0.75), before)
    model.load_state_dict(FrameTransformer(SMALL, seed=2).state_dict())
    assert torch.equal(model.conditioning.table(0.75), fresh())
    model.load_state_dict(FrameTransformer(SMALL, seed=3).state_dict(), assign=True)
    assert torch.equal(model.conditioning.table(0.75), fresh())
    model.double()
    assert torch.equal(model.conditioning.table(0.75), fresh())


def test_few_modulation_tables_are_kept():
    conditioning = FrameTransformer(SMALL).conditioning
    levels = [level / 100 for level in range(2 * MAX_TABLES)]
    tables = [conditioning.table(level) for level in levels]
    assert conditioning.table(levels[-1]) is tables[-1]
    assert conditioning.table(levels[0]) is not tables[0]
    assert len(conditioning._tables) == MAX_TABLES


def test_the_table_and_the_path_with_gradients_agree():
    model = FrameTransformer(SMALL, seed=1)
    with_gradient = model(random_frames(2), 0.75, random_actions(2), clocks(0, 1), OwnFrameOnly(), commit=False)
    torch.testing.assert_close(with_gradient, one_pass(model), atol=1e-5, rtol=0)
    with_gradient.square().mean().backward()
    assert all(weight.grad is not None and weight.grad.isfinite().all() for weight in model.parameters())


# -- refusals ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"x": torch.zeros(1, 3, 8, 8)}, "x is torch.float32 [1, 3, 8, 8]: expected floating [B, 1, 8, 8]"),
        (
            {"x": torch.zeros(1, 1, 8, 8, dtype=torch.uint8)},
            "x is torch.uint8 [1, 1, 8, 8]: expected floating [B, 1, 8, 8]",
        ),
        ({"sigma": 1.5}, "sigma=1.5: expected 0 to 1"),
        ({"sigma": math.nan}, "sigma=nan: expected 0 to 1"),
        ({"action": clocks(3)}, "action=3: expected 0 to 2"),
        ({"action": clocks(-1)}, "action=-1: expected 0 to 2"),
        ({"action": torch.zeros(1)}, "action is torch.float32 [1]: expected int64 [1]"),
        ({"frame_pos": clocks(0, 1)}, "frame_pos is torch.int64 [2]: expected int64 [1]"),
    ],
)
def test_a_bad_input_is_refused_in_one_line_before_the_cache_is_touched(changes, message):
    arguments = {"x": torch.zeros(1, 1, 8, 8), "sigma": 0.0, "action": clocks(0), "frame_pos": clocks(0)} | changes
    resource = OwnFrameOnly()
    with pytest.raises(ValueError) as caught:
        FrameTransformer(SMALL)(**arguments, resource=resource, commit=True)
    assert str(caught.value) == message
    assert not resource.calls


# -- compiled regions ----------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("rows", [1, 2])
def test_three_compilations_serve_all_layers_passes_and_clocks_and_equal_eager(rows):
    from torch._dynamo.utils import counters

    torch.compiler.reset()
    counters.clear()
    eager = FrameTransformer(SMALL, seed=1)
    compiled = copy.deepcopy(eager)
    compile_regions(compiled)
    rings = [ring_for(SMALL, num_sessions=rows) for _ in range(2)]
    rids = tuple(f"r{i}" for i in range(rows))
    for ring in rings:
        for rid in rids:
            ring.ingest_request(rid)
    for frame in range(8):
        step, ctx = FrameStep(frames=tuple((rid, frame) for rid in rids)), StepContext(request_ids=rids)
        outputs = []
        for model, ring in zip((eager, compiled), rings, strict=True):
            assert ring.admit(step, ctx).ok
            ring.plan(step, ctx)
            x, action, frame_pos = random_frames(rows, seed=frame), random_actions(rows), clocks(*[frame] * rows)
            with torch.no_grad():
                out = [model(x, sigma, action, frame_pos, ring, commit=sigma == 0) for sigma in SMALL.sigmas]
            ring.commit(step, ctx)
            outputs.append(torch.stack(out))
        assert (outputs[0] - outputs[1]).abs().max() <= 1e-5 * outputs[0].abs().max()
        assert counters["stats"]["unique_graphs"] == 3
