"""Scripted policies: good enough to keep a game going, random enough that actions and outcomes vary.

Positions are read from the console's RAM because a ball in front of the bricks cannot be told from the screen; the
tests check addresses and offsets against the screen.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from model.data.names import game_actions

Ram = npt.NDArray[np.uint8]

MAX_HOLD_STEPS = 8

_FREEWAY_ODDS = (0.15, 0.7, 0.15)  # NOOP, UP, DOWN
_FOLLOWER_EXPLORES = 0.06
"""Chance per step that a paddle lets go of the ball for a while: about a fifth of all steps."""

_NOOP, _FIRE, _RIGHT, _LEFT = 0, 1, 2, 3  # the same indices in Pong and in Breakout
_DEAD_ZONE_PIXELS = 6
"""How far off its centre a paddle (16 long) may meet the ball: four screens of moving overshoot a smaller error."""


class ScriptedPolicy:
    """Follows the ball, or, where there is none to follow, holds one random choice after the other.

    odds: chance of each action, by index, when exploring. explores: chance per step to begin exploring; a choice is
    then held for 1 to ``MAX_HOLD_STEPS`` steps. follow: the action otherwise; None explores all the time.
    """

    def __init__(
        self,
        rng: np.random.Generator,
        odds: tuple[float, ...],
        explores: float = 1.0,
        follow: Callable[[Ram], int] | None = None,
    ) -> None:
        self._rng, self._odds, self._explores, self._follow = rng, odds, explores, follow
        self._held_action, self._held_steps = _NOOP, 0

    def __call__(self, ram: Ram) -> int:
        """The action index that the policy chooses when the console's RAM is ``ram``, uint8 [128]."""
        if self._held_steps == 0:
            if self._follow is not None and self._rng.random() >= self._explores:
                return self._follow(ram)
            self._held_action = int(self._rng.choice(len(self._odds), p=self._odds))
            self._held_steps = int(self._rng.integers(1, MAX_HOLD_STEPS + 1))
        self._held_steps -= 1
        return self._held_action


def make_policy(game: str, rng: np.random.Generator) -> ScriptedPolicy:
    """A policy for ``game`` (freeway, pong or breakout) that draws from ``rng``."""
    if game == "freeway":
        return ScriptedPolicy(rng, _FREEWAY_ODDS)
    follow = {"pong": _follow_in_pong, "breakout": _follow_in_breakout}[game]
    num_actions = game_actions(game)
    return ScriptedPolicy(rng, (1 / num_actions,) * num_actions, _FOLLOWER_EXPLORES, follow)


def pong_ball(ram: Ram) -> tuple[int, int] | None:
    """Screen column and row of the top left pixel of Pong's ball (2 x 4); None while there is no ball."""
    return None if ram[54] == 0 else (int(ram[49]) - 49, int(ram[54]) - 14)


def breakout_ball(ram: Ram) -> tuple[int, int] | None:
    """Screen column and row of the top left pixel of Breakout's ball (2 x 4); None while there is no ball."""
    return None if ram[101] == 0 else (int(ram[99]) - 49, int(ram[101]) + 9)


def pong_paddle_top(ram: Ram) -> int:
    """Screen row of the top of the right paddle (16 rows)."""
    return int(ram[51]) - 13


def breakout_paddle_left(ram: Ram) -> int:
    """Screen column of the left end of the paddle (16 columns)."""
    return int(ram[72]) - 47


def _follow_in_pong(ram: Ram) -> int:
    ball = pong_ball(ram)
    if ball is None:
        return _NOOP
    below = (ball[1] + 2) - (pong_paddle_top(ram) + 8)
    return _toward(below, increase=_LEFT, decrease=_RIGHT)  # RIGHT turns the paddle up, LEFT down


def _follow_in_breakout(ram: Ram) -> int:
    ball = breakout_ball(ram)
    if ball is None:
        return _FIRE
    to_the_right = (ball[0] + 1) - (breakout_paddle_left(ram) + 8)
    return _toward(to_the_right, increase=_RIGHT, decrease=_LEFT)


def _toward(offset: int, *, increase: int, decrease: int) -> int:
    if abs(offset) <= _DEAD_ZONE_PIXELS:
        return _NOOP
    return increase if offset > 0 else decrease
