"""Where the sprites of a game are in small frames, read from their colours; None where that cannot be told.

Frames are the recorder's: the playfield averaged down, in RGB (in luma some cars are as grey as the road). A sprite is
found by how much of each pixel it covers: the difference to the empty playfield, projected on the difference between
the sprite's colour and the ground's. The covered area must be about the sprite's own, in one place, and of its colour;
otherwise the answer is None, never the best of bad guesses.

Letters: H, W rows and columns of a frame, N frames. Positions are those of the middle of
the sprite's visible part, in pixels of the frame: the middle of the first pixel is 0.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from model.data.clip import Pixels

Values = npt.NDArray[np.float64]

_LEAST, _MOST = 0.5, 1.6
"""Share of a sprite's area that has to be covered, and that may be: a blurred sprite keeps its area."""

_ELSEWHERE = 0.5
"""Share of a sprite's area that may look covered outside of its place."""

_IMPURE = 0.6
"""How much of another colour there may be, over how much of the sprite's."""

MIN_SIDE = 48
"""Rows and columns of a frame below which lanes and paddles blur into their neighbours."""

_SCREEN_COLUMNS = 160


def empty_field(frames: Pixels) -> Pixels:
    """What most frames of uint8 [N, H, W, 3] show at each pixel: the median, uint8 [H, W, 3]."""
    return np.median(frames, axis=0).round().astype(np.uint8)


class FreewayTracker:
    """The left chicken's height and every lane's car. field: the road without sprites, uint8 [H, W, 3]."""

    LANES = 10

    _ROWS = 180  # of the screen, between the kerbs
    _ROAD = (142, 142, 142)
    _CHICKEN = (252, 252, 84)
    _CARS = (
        (167, 26, 26),
        (180, 231, 117),
        (105, 105, 15),
        (228, 111, 111),
        (24, 26, 167),
        (162, 98, 33),
        (84, 92, 214),
        (184, 50, 50),
        (135, 183, 84),
        (210, 210, 64),
    )
    _CAR_COLUMNS, _CAR_ROWS, _CAR_PIXELS = 8, 8, 46  # without its black wheels, a row above and one below
    _FIRST_CAR_ROW, _LANE_ROWS = 12, 16
    _CHICKEN_COLUMNS, _CHICKEN_ROWS, _CHICKEN_PIXELS = (44, 52), 8, 21

    def __init__(self, field: Pixels) -> None:
        self._field = _checked(field)
        self._down, self._across = field.shape[0] / self._ROWS, field.shape[1] / _SCREEN_COLUMNS
        self._area = self._down * self._across

    def cars(self, frame: Pixels) -> list[float | None]:
        """Column of the car of each lane, from the top, in ``frame`` uint8 [H, W, 3]."""
        difference = frame.astype(np.float64) - self._field
        return [self._car(difference, lane) for lane in range(self.LANES)]

    def chicken(self, frame: Pixels) -> float | None:
        """Row of the left chicken. None also while it shares a lane with a car that crosses its column."""
        difference = frame.astype(np.float64) - self._field
        first, end = (edge * self._across for edge in self._CHICKEN_COLUMNS)
        columns = slice(int(first), int(np.ceil(end)))
        covered, other = _covered(difference[:, columns], self._CHICKEN, self._ROAD)
        reach = (end - first + self._CAR_COLUMNS * self._across) / 2
        for lane, car in enumerate(self.cars(frame)):
            if car is not None and abs(car - ((first + end) / 2 - 0.5)) < reach + 1:
                rows = self._lane_rows(lane, whole=False)
                covered[rows], other[rows] = 0.0, 0.0
        return _place(
            covered.sum(axis=1), other.sum(axis=1), self._CHICKEN_ROWS * self._down, self._CHICKEN_PIXELS * self._area
        )

    def _lane_rows(self, lane: int, *, whole: bool) -> slice:
        """Rows of the frame that show nothing but the body of the lane's car; or all that the car touches."""
        first = self._FIRST_CAR_ROW + self._LANE_ROWS * lane
        if whole:
            return slice(int(np.ceil(first * self._down)), int((first + self._CAR_ROWS) * self._down))
        return slice(int((first - 1) * self._down), int(np.ceil((first + self._CAR_ROWS + 1) * self._down)))

    def _car(self, difference: Values, lane: int) -> float | None:
        rows = self._lane_rows(lane, whole=True)
        covered, other = _covered(difference[rows], self._CARS[lane], self._ROAD)
        length = self._CAR_COLUMNS * self._across
        area = self._CAR_PIXELS / self._CAR_ROWS * (rows.stop - rows.start) * self._across
        place = _place(covered.sum(axis=0), other.sum(axis=0), length, area)
        first, end = (edge * self._across for edge in self._CHICKEN_COLUMNS)
        if place is None or abs(place - ((first + end) / 2 - 0.5)) > length / 2:
            return place
        columns = slice(int(first), int(np.ceil(end)))
        _, other_than_chicken = _covered(difference[rows, columns], self._CHICKEN, self._ROAD)
        return None if other_than_chicken.sum() <= other[:, columns].sum() else place


class PongTracker:
    """Both paddles' heights and the ball. field: the playfield without sprites, uint8 [H, W, 3]."""

    _ROWS = 160  # of the screen, between the bars
    _GROUND = (144, 72, 17)
    _PADDLE, _OPPONENT, _BALL = (92, 186, 92), (213, 130, 74), (236, 236, 236)
    _PADDLE_COLUMNS, _OPPONENT_COLUMNS, _PADDLE_ROWS = (140, 144), (16, 20), 16
    _OPEN_COLUMNS = (20, 140)  # between the paddles
    _BALL_COLUMNS, _BALL_ROWS = 2, 4

    def __init__(self, field: Pixels) -> None:
        self._field = _checked(field)
        self._down, self._across = field.shape[0] / self._ROWS, field.shape[1] / _SCREEN_COLUMNS

    def paddle(self, frame: Pixels) -> float | None:
        """Row of the right paddle, which the actions move, in ``frame`` uint8 [H, W, 3]."""
        return self._paddle(frame, self._PADDLE, self._PADDLE_COLUMNS)

    def opponent(self, frame: Pixels) -> float | None:
        """Row of the left paddle, which the console moves."""
        return self._paddle(frame, self._OPPONENT, self._OPPONENT_COLUMNS)

    def _paddle(self, frame: Pixels, color: tuple[int, int, int], screen_columns: tuple[int, int]) -> float | None:
        difference = frame.astype(np.float64) - self._field
        covered, other = _covered(difference[:, _columns(screen_columns, self._across)], color, self._GROUND)
        rows, width = self._PADDLE_ROWS * self._down, (screen_columns[1] - screen_columns[0]) * self._across
        return _place(covered.sum(axis=1), other.sum(axis=1), rows, rows * width)

    def ball(self, frame: Pixels) -> tuple[float, float] | None:
        """Row and column of the ball. None also where it is not between the paddles."""
        difference = frame.astype(np.float64) - self._field
        columns = _columns(self._OPEN_COLUMNS, self._across)
        covered, other = _covered(difference[:, columns], self._BALL, self._GROUND)
        height, width = self._BALL_ROWS * self._down, self._BALL_COLUMNS * self._across
        row = _place(covered.sum(axis=1), other.sum(axis=1), height, height * width)
        column = _place(covered.sum(axis=0), other.sum(axis=0), width, height * width)
        return None if row is None or column is None else (row, column + columns.start)


def _columns(screen: tuple[int, int], across: float) -> slice:
    return slice(int(screen[0] * across), int(np.ceil(screen[1] * across)))


def _checked(field: Pixels) -> Values:
    if field.ndim != 3 or field.shape[2] != 3 or min(field.shape[:2]) < MIN_SIDE:
        raise ValueError(f"frames of {list(field.shape)}: expected RGB of {MIN_SIDE} x {MIN_SIDE} or more")
    return field.astype(np.float64)


def _covered(difference: Values, color: tuple[int, int, int], ground: tuple[int, int, int]) -> tuple[Values, Values]:
    """Share of each pixel of [H, W, 3] that ``color`` covers, and the share that something of another colour does."""
    direction = np.subtract(color, ground, dtype=np.float64)
    norm = float(direction @ direction)
    share = difference @ direction / norm
    rest = difference - share[..., None] * direction
    return share, np.sqrt(np.square(rest).sum(axis=-1) / norm) + np.maximum(-share, 0)


def _place(covered: Values, other: Values, length: float, area: float) -> float | None:
    """Middle of the one stretch of ``length`` pixels of a profile [n] that holds about ``area``, or None."""
    window = min(int(np.ceil(length)) + 1, len(covered))
    sums = np.convolve(covered, np.ones(window), "valid")
    start = int(sums.argmax())
    inside = slice(start, start + window)
    found, weights = float(sums[start]), np.maximum(covered[inside], 0)
    elsewhere = float(np.maximum(covered, 0).sum() - weights.sum())
    if not _LEAST * area <= found <= _MOST * area or elsewhere > _ELSEWHERE * area:
        return None
    if float(other[inside].sum()) > _IMPURE * found:
        return None
    return start + float(np.arange(window) @ weights / weights.sum())
