"""Atari games recorded with a scripted policy: real frames, and the action that was really executed before each.

The emulator is driven directly, four emulator frames per recorded frame, with its own stickiness off: stickiness and
exploration are drawn here, from the clip's seed, so the executed action is known and a clip can be made again. Only
the last of the four screens is kept. The three games draw every object on every screen, so the usual maximum over
two screens would not restore anything and would show the ball twice.
"""

from __future__ import annotations

from dataclasses import dataclass
from importlib.metadata import version

import numpy as np

from model.data.clip import Actions, Clip, Pixels
from model.data.names import action_names
from model.data.pixels import to_size
from model.data.policies import Ram, make_policy

RECORDER_VERSION = 1
"""Raised when the same request would give other bytes, so that cached clips of before are not taken for them."""

FRAME_SKIP = 4
STICKINESS = 0.25
"""Chance that the action executed last is executed again instead of the one the policy chose."""

MAX_LEAD_IN_STEPS = 128
_EMULATOR_FPS = 60.0
_NOOP = 0

_PLAYFIELD = {
    "freeway": (slice(16, 196), slice(0, 160)),  # kerb to kerb, without score and logo
    "pong": (slice(34, 194), slice(0, 160)),  # between the white bars
    "breakout": (slice(33, 193), slice(8, 152)),  # inside the walls, down to the paddle
}
"""Rows and columns of the 210 x 160 screen.

At 64 x 64 a ball (2 x 4 screen pixels) covers 1.3 to 1.4 pixels, so a row or column more or less decides whether it
stays visible wherever it falls on the grid, in luma above all: ``tests/test_data_sprites.py`` measures that.
"""


@dataclass(frozen=True)
class ClipRequest:
    """What decides the bytes of a recorded clip, besides the versions of recorder and emulator."""

    game: str
    num_frames: int
    channels: int
    height: int
    width: int
    seed: int
    index: int


class Player:
    """A game being played by its scripted policy."""

    def __init__(self, game: str, rng: np.random.Generator) -> None:
        from ale_py import ALEInterface, LoggerMode, roms

        ALEInterface.setLoggerMode(LoggerMode.Error)  # before the first instance, which would print a banner
        self._emulator = ALEInterface()
        self._emulator.setFloat("repeat_action_probability", 0.0)
        self._emulator.setInt("frame_skip", 1)
        self._emulator.setInt("random_seed", 0)
        self._emulator.loadROM(roms.get_rom_path(game))
        # ``act`` takes these enum members; an index into the minimal set would be another action (2 is UP, not RIGHT).
        self._actions = self._emulator.getMinimalActionSet()
        names = tuple(action.name for action in self._actions)
        assert names == action_names(game), f"{game}: the emulator's actions are {names}"
        self._game = game
        self._rng = rng
        self.reset()

    def reset(self) -> None:
        """Start a new episode, with a policy that remembers nothing."""
        self._emulator.reset_game()
        self._policy = make_policy(self._game, self._rng)
        self._executed = _NOOP

    @property
    def over(self) -> bool:
        """Whether the episode has ended; the next step needs a ``reset`` first."""
        return bool(self._emulator.game_over())

    @property
    def screen(self) -> Pixels:
        """The screen now: uint8 [210, 160, 3], RGB."""
        return self._emulator.getScreenRGB()

    @property
    def ram(self) -> Ram:
        """The console's RAM now: uint8 [128]."""
        return self._emulator.getRAM()

    def step(self, action: int | None = None) -> int:
        """Execute ``action``, or what the policy and stickiness make of this moment; returns the executed action."""
        if action is None:
            chosen = self._policy(self.ram)
            action = self._executed if self._rng.random() < STICKINESS else chosen
        self._executed = action
        for _ in range(FRAME_SKIP):
            self._emulator.act(self._actions[action])
            if self.over:
                break
        return action


def render(game: str, screen: Pixels, *, channels: int, height: int, width: int) -> Pixels:
    """A screen uint8 [210, 160, 3], cropped to the playfield and area-averaged: uint8 [height, width, channels]."""
    return to_size(screen[_PLAYFIELD[game]], channels=channels, height=height, width=width)


def record(request: ClipRequest) -> Clip:
    """Play and record; the same request gives the same bytes.

    A clip lies within one episode: it begins some steps into one, and if that one ends too soon, at the start of the
    next. If that one is too short as well, the recording goes on: the frame after the end of an episode is the first
    of a new one, and ``Clip.source`` says how many were joined. Row 0 is a NOOP that was executed to reach frame 0.
    """
    # A spawn key, not one list of words: [2**32, 0] and [0, 1] would be the same entropy.
    rng = np.random.default_rng(np.random.SeedSequence(request.seed, spawn_key=(request.index,)))
    player = Player(request.game, rng)
    for _ in range(int(rng.integers(MAX_LEAD_IN_STEPS + 1))):
        player.step()
        if player.over:
            player.reset()
    recording = _record_from_here(player, request, may_join=False)
    if recording is None:
        player.reset()
        recording = _record_from_here(player, request, may_join=True)
    assert recording is not None
    frames, actions, episodes = recording
    joined = f", {episodes} episodes joined" if episodes > 1 else ""
    return Clip.of(
        frames,
        actions,
        num_actions=len(action_names(request.game)),
        fps=_EMULATOR_FPS / FRAME_SKIP,
        source=(
            f"{request.game} (ale-py {version('ale-py')}), seed {request.seed}, clip {request.index}, "
            f"frame skip {FRAME_SKIP}, stickiness {STICKINESS}{joined}"
        ),
    )


def _record_from_here(player: Player, request: ClipRequest, *, may_join: bool) -> tuple[Pixels, Actions, int] | None:
    """Frames, actions and number of episodes; None if the episode ended and another may not be joined to it."""
    frames = np.empty((request.num_frames, request.height, request.width, request.channels), np.uint8)
    actions = np.empty(request.num_frames, np.int64)
    episodes = 1
    for row in range(request.num_frames):
        if player.over:
            if not may_join:
                return None
            player.reset()
            episodes += 1
        actions[row] = player.step(_NOOP if row == 0 else None)
        frames[row] = render(
            request.game, player.screen, channels=request.channels, height=request.height, width=request.width
        )
    return frames, actions, episodes
