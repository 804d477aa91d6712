"""A list of files of conf/kv, as the scripts that set several strategies side by side take it. No torch."""

from __future__ import annotations

from collections.abc import Sequence

from omegaconf import OmegaConf

from scripts.app.compose import CONF_DIR
from scripts.app.errors import BadInput
from scripts.app.schema import KVKnobs, PoolKnobs
from scripts.app.strategies import POOL_KNOBS, STRATEGIES


def kv_choices(names: Sequence[str], pool: PoolKnobs, *, reference: str) -> dict[str, KVKnobs]:
    """The knobs of each of ``names``, with the pool knobs that were set where a strategy has them.

    ``BadInput`` for a name that is no file of conf/kv or stands there twice, a missing ``reference``, and a pool knob
    that none of them has.
    """
    kinds = {path.stem: OmegaConf.load(path) for path in sorted((CONF_DIR / "kv").glob("*.yaml"))}
    listed = f"strategies={bracketed(names)}"
    for name in names:
        if name not in kinds:
            raise BadInput(f"{listed}: {name} is none; expected some of {', '.join(kinds)}")
        if names.count(name) > 1:
            raise BadInput(f"{listed}: {name} stands there twice; expected each once")
    if reference not in names:
        raise BadInput(f"{listed}: expected {reference} among them, which the others are compared with")
    knobs = {name: KVKnobs(**{str(key): value for key, value in kinds[name].items()}) for name in names}
    for knob in POOL_KNOBS:
        value = getattr(pool, knob)
        having = [name for name in names if knob in STRATEGIES[knobs[name].strategy].knobs]
        if value is not None and not having:
            raise BadInput(f"kv.{knob}={value}: none of {listed} has such a knob")
        for name in having if value is not None else ():
            setattr(knobs[name], knob, value)
    return knobs


def bracketed(names: Sequence[str]) -> str:
    """The list as it stands on a command line."""
    return f"[{','.join(names)}]"
