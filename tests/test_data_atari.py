"""Recorded games: the stored actions are the executed ones, clips can be made again, and the cache is verified."""

from __future__ import annotations

import dataclasses
import logging
import os
from math import lcm
from pathlib import Path
from typing import Any

import ale_py
import numpy as np
import pytest

from model.data import Clip, load_clip
from model.data import atari as recorder
from model.data.atari import ClipRequest, Player, record
from model.data.cache import clip_file
from model.data.policies import (
    breakout_ball,
    breakout_paddle_left,
    make_policy,
    pong_ball,
    pong_paddle_top,
)

GAMES = ("freeway", "pong", "breakout")
CODES = {  # ALE's own action codes, by index into each game's minimal set, written out
    "freeway": (0, 2, 5),
    "pong": (0, 1, 3, 4, 11, 12),
    "breakout": (0, 1, 3, 4),
}
FIELDS = {  # rows and columns of the playfield, written out
    "freeway": (16, 196, 0, 160),
    "pong": (34, 194, 0, 160),
    "breakout": (33, 193, 8, 152),
}


def request(game: str, num_frames: int = 12, seed: int = 5, index: int = 0) -> ClipRequest:
    return ClipRequest(game, num_frames, 3, 64, 64, seed, index)


def clip_in(folder: Path, **changes: object) -> Clip:
    arguments: dict = {"num_frames": 6, "channels": 3, "height": 32, "width": 32, "seed": 3, "folder": folder}
    name = str(changes.pop("name", "pong"))
    return load_clip(name, **(arguments | changes))


def fresh_emulator(game: str) -> ale_py.ALEInterface:
    emulator = ale_py.ALEInterface()
    emulator.setFloat("repeat_action_probability", 0.0)
    emulator.setInt("random_seed", 0)
    emulator.loadROM(ale_py.roms.get_rom_path(game))
    emulator.reset_game()
    return emulator


def averaged(screen: np.ndarray, rows: int, columns: int) -> np.ndarray:
    """Area average in plain floats: enlarge until every output pixel is a whole block, then take block means."""
    height, width = lcm(screen.shape[0], rows), lcm(screen.shape[1], columns)
    large = np.repeat(np.repeat(screen.astype(float), height // screen.shape[0], 0), width // screen.shape[1], 1)
    blocks = large.reshape(rows, height // rows, columns, width // columns, -1)
    return blocks.mean((1, 3))


@pytest.mark.parametrize("game", GAMES)
def test_the_stored_actions_replayed_on_an_emulator_of_its_own_give_the_stored_frames(
    game: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Row f is the action that led to frame f, as it was executed: nothing else would replay to the same frames."""
    monkeypatch.setattr(recorder, "MAX_LEAD_IN_STEPS", 0)
    clip = record(dataclasses.replace(request(game, num_frames=40), height=24, width=18))
    emulator = fresh_emulator(game)
    top, bottom, left, right = FIELDS[game]
    for action, frame in zip(clip.actions, clip.frames, strict=True):
        for _ in range(4):
            emulator.act(ale_py.Action(CODES[game][action]))
        expected = averaged(emulator.getScreenRGB()[top:bottom, left:right], 24, 18)
        assert np.abs(frame - expected).max() <= 0.5 + 1e-9
    assert clip.actions[0] == 0
    assert len(set(clip.actions.tolist())) > 1
    assert (clip.num_actions, clip.fps) == (len(CODES[game]), 15.0)


@pytest.mark.parametrize("game", GAMES)
def test_two_recordings_of_one_request_are_equal_to_the_byte_and_another_seed_or_index_differs(game: str) -> None:
    once, again = record(request(game)), record(request(game))
    assert once.frames.tobytes() == again.frames.tobytes()
    assert once.actions.tobytes() == again.actions.tobytes()
    assert once.content_hash == again.content_hash
    others = [record(request(game, seed=6)), record(request(game, index=1)), record(request(game, seed=2**32 + 5))]
    assert len({clip.content_hash for clip in [once, *others]}) == 4


def test_a_quarter_of_the_steps_repeat_the_action_executed_before(monkeypatch: pytest.MonkeyPatch) -> None:
    chosen: list[int] = []

    def cycling(game: str, rng: np.random.Generator) -> object:
        def policy(ram: np.ndarray) -> int:
            chosen.append(len(chosen) % 6)
            return chosen[-1]

        return policy

    monkeypatch.setattr(recorder, "make_policy", cycling)
    player = Player("pong", np.random.default_rng(0))
    executed = [player.step() for _ in range(600)]
    stuck = [step for step in range(600) if executed[step] != chosen[step]]
    assert all(executed[step] == (executed[step - 1] if step else 0) for step in stuck)
    assert 108 <= len(stuck) <= 192  # 150 expected, four standard deviations either way


def test_a_clip_stays_within_one_episode_when_the_next_one_is_long_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    ends = iter_episode_ends(monkeypatch, after_resets={1: 10})
    clip = record(request("pong", num_frames=30))
    assert "joined" not in clip.source
    assert len(ends) == 2  # the first reset made the episode that was too short, the second the one recorded


def test_episodes_are_joined_and_the_source_says_so_when_none_is_long_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    iter_episode_ends(monkeypatch, after_resets=dict.fromkeys(range(1, 20), 10))
    clip = record(request("pong", num_frames=30))
    assert clip.frames.shape[0] == 30
    assert clip.source.endswith("3 episodes joined")


def iter_episode_ends(monkeypatch: pytest.MonkeyPatch, after_resets: dict[int, int]) -> list[int]:
    """Let the n-th episode end after that many steps; returns the list of resets as they happen. No lead-in."""
    monkeypatch.setattr(recorder, "MAX_LEAD_IN_STEPS", 0)
    resets: list[int] = []
    steps = 0
    real_reset, real_step = Player.reset, Player.step

    def reset(self: Player) -> None:
        nonlocal steps
        resets.append(len(resets) + 1)
        steps = 0
        real_reset(self)

    def step(self: Player, action: int | None = None) -> int:
        nonlocal steps
        steps += 1
        return real_step(self, action)

    monkeypatch.setattr(Player, "reset", reset)
    monkeypatch.setattr(Player, "step", step)
    monkeypatch.setattr(Player, "over", property(lambda self: steps >= after_resets.get(len(resets), 10**9)))
    return resets


@pytest.mark.parametrize(
    ("game", "color", "rows", "ball_of"),
    [
        ("pong", (236, 236, 236), slice(34, 194), pong_ball),
        ("breakout", (200, 72, 72), slice(93, 189), breakout_ball),
    ],
)
def test_the_policies_read_ball_and_paddle_where_the_screen_shows_them(game, color, rows, ball_of) -> None:  # type: ignore[no-untyped-def]
    player = Player(game, np.random.default_rng(2))
    off = []
    paddle_off = []
    for _ in range(200):
        player.step()
        ram, screen = player.ram, player.screen
        row, column = np.nonzero((screen[rows, 8:152] == color).all(-1))
        if len(row) == 8 and np.ptp(row) == 3:
            ball = ball_of(ram)
            assert ball is not None
            off.append((ball[0] - column.min() - 8, ball[1] - row.min() - rows.start))
        if game == "pong":
            paddle = np.nonzero((screen[34:194, 140:144] == (92, 186, 92)).all(-1))[0] + 34
            if len(paddle) == 64:
                paddle_off.append(pong_paddle_top(ram) - paddle.min())
        else:
            paddle = np.nonzero((screen[189:193, 8:152] == (200, 72, 72)).all(-1))[1] + 8
            if len(paddle) == 64:
                paddle_off.append(breakout_paddle_left(ram) - paddle.min())
    assert len(off) > 60
    assert len(paddle_off) > 60
    assert np.abs(np.median(off, axis=0)).max() <= 1
    assert np.mean(np.abs(off).max(-1) <= 2) > 0.95
    assert np.mean(np.abs(paddle_off) <= 2) > 0.95


def test_the_freeway_policy_mostly_goes_up_and_holds_each_choice_for_one_to_eight_steps() -> None:
    policy = make_policy("freeway", np.random.default_rng(0))
    choices = [policy(np.zeros(128, np.uint8)) for _ in range(3000)]
    shares = np.bincount(choices, minlength=3) / len(choices)
    assert shares[1] > 0.6
    assert shares[0] > 0.08
    assert shares[2] > 0.08
    changes = np.mean(np.diff(choices) != 0)
    assert 0.05 < changes < 0.2  # a choice is held 4.5 steps on average; about half of the next ones are the same


@pytest.mark.parametrize(("game", "ball_ram", "action"), [("pong", {54: 200}, 3), ("breakout", {}, 1)])
def test_a_paddle_goes_after_the_ball_most_of_the_time_and_breakout_fires_for_a_lost_one(
    game: str, ball_ram: dict[int, int], action: int
) -> None:
    ram = np.zeros(128, np.uint8)
    ram[51], ram[72] = 60, 100
    for address, value in ball_ram.items():
        ram[address] = value
    policy = make_policy(game, np.random.default_rng(0))
    choices = np.bincount([policy(ram) for _ in range(1000)], minlength=4)
    assert choices[action] > 700
    assert (choices > 0).all()


def test_a_cached_clip_is_read_back_and_not_played_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = clip_in(tmp_path / "data")
    monkeypatch.setattr(recorder, "record", lambda request: pytest.fail("recorded although it was cached"))
    again = clip_in(tmp_path / "data")
    for field in dataclasses.fields(Clip):
        assert np.array_equal(getattr(first, field.name), getattr(again, field.name)), field.name
    assert again.frames.dtype == np.uint8
    assert again.actions.dtype == np.int64
    assert [file.suffix for file in (tmp_path / "data").iterdir()] == [".npz"]


def test_everything_that_decides_a_clip_is_in_its_cache_key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    base = ClipRequest("pong", 6, 3, 32, 32, 3, 0)
    others = []
    for field in dataclasses.fields(base):
        changed: Any = "freeway" if field.name == "game" else getattr(base, field.name) + 1
        others.append(dataclasses.replace(base, **{field.name: changed}))
    files = {clip_file(each, tmp_path) for each in [base, *others]}
    monkeypatch.setattr(recorder, "RECORDER_VERSION", recorder.RECORDER_VERSION + 1)
    files.add(clip_file(base, tmp_path))
    assert len(files) == len(dataclasses.fields(base)) + 2


def damage_by_truncating(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:200])


def damage_by_emptying(file: Path) -> None:
    file.write_bytes(b"")


def damage_by_changing_a_pixel(file: Path) -> None:
    with np.load(file) as stored:
        arrays = dict(stored)
    arrays["frames"][2, 3, 4, 0] ^= 1
    np.savez_compressed(file, **arrays)


def damage_by_renaming_another_clip(file: Path) -> None:
    clip_in(file.parent, num_frames=5)
    next(other for other in file.parent.iterdir() if other != file).replace(file)


@pytest.mark.parametrize(
    "damage",
    [damage_by_truncating, damage_by_emptying, damage_by_changing_a_pixel, damage_by_renaming_another_clip],
)
def test_a_damaged_cache_file_is_recorded_again_with_a_warning(damage, tmp_path, caplog) -> None:  # type: ignore[no-untyped-def]
    first = clip_in(tmp_path)
    (file,) = tmp_path.iterdir()
    damage(file)
    with caplog.at_level(logging.WARNING):
        again = clip_in(tmp_path)
    assert again.content_hash == first.content_hash
    assert again.frames.tobytes() == first.frames.tobytes()
    assert [str(file) in record.message for record in caplog.records] == [True]
    caplog.clear()
    assert clip_in(tmp_path).content_hash == first.content_hash
    assert caplog.records == []


def test_a_write_that_fails_leaves_no_file_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full_disk(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full_disk)
    with pytest.raises(ValueError, match=r"^data\.folder=.*No space left on device\)$"):
        clip_in(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_is_a_file_is_refused_in_one_line(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match=r"^data\.folder='.*file': expected a folder to write to"):
        clip_in(tmp_path / "file")


@pytest.mark.parametrize(("channels", "height", "width"), [(1, 64, 64), (3, 30, 47), (1, 250, 200)])
def test_channels_and_size_are_free(channels: int, height: int, width: int, tmp_path: Path) -> None:
    clip = clip_in(tmp_path, num_frames=3, channels=channels, height=height, width=width)
    assert clip.frames.shape == (3, height, width, channels)
    assert clip.frames.std() > 1


def test_the_emulator_prints_nothing(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    clip_in(tmp_path, num_frames=1)
    captured = capfd.readouterr()
    assert captured.out + captured.err == ""
