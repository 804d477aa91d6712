"""Imports run one way. The rules are read from the syntax tree, so lazy imports inside functions count too.

Each rule is shown to fail on a planted module.
"""

from __future__ import annotations

import ast
import dataclasses
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import ringkv

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("ringkv", "model", "scripts")
STRATEGIES = ("ringkv.ring", "ringkv.paged", "ringkv.full", "ringkv.shift", "ringkv.peers")
NO_TORCH = ("ringkv", "ringkv.config", "ringkv.step", "ringkv.horizon", "ringkv.memory")
LIBRARY_NEEDS = {"ringkv", "torch", "safetensors"}
HARNESS_NEEDS = LIBRARY_NEEDS | {"numpy", "psutil", "rich"}
PEERS_NEED = LIBRARY_NEEDS | {"transformers"}
WHERE_USED = {"wandb", "matplotlib", "av", "PIL"}


@dataclasses.dataclass(frozen=True)
class Import:
    target: str  # dotted name of what is imported: a module, or a module and a name in it
    top_level: bool  # runs when the module is imported
    typing_only: bool  # under TYPE_CHECKING


Modules = dict[str, list[Import]]


def is_type_checking(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and ast.unparse(node.test) in ("TYPE_CHECKING", "typing.TYPE_CHECKING")


def imports_of(source: str, module: str, is_package: bool) -> list[Import]:
    """Every import in ``source``, relative ones resolved."""
    package = module if is_package else module.rpartition(".")[0]
    found: list[Import] = []

    def visit(node: ast.AST, top_level: bool, typing_only: bool) -> None:
        if isinstance(node, ast.Import):
            found.extend(Import(alias.name, top_level, typing_only) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            parts = package.split(".") if node.level else []
            base = ".".join([*parts[: len(parts) - node.level + 1], *([node.module] if node.module else [])])
            found.extend(Import(f"{base}.{alias.name}", top_level, typing_only) for alias in node.names)
        elif is_type_checking(node):
            assert isinstance(node, ast.If)
            for statement in node.body:
                visit(statement, top_level, True)
            for statement in node.orelse:
                visit(statement, top_level, typing_only)
        else:
            inside = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
            for child in ast.iter_child_nodes(node):
                visit(child, top_level and not inside, typing_only)

    visit(ast.parse(source), True, False)
    return found


def checkout() -> dict[str, tuple[Path, bool]]:
    """Module name -> file and whether it is a package, of everything we ship."""
    out = {}
    for package in PACKAGES:
        for path in sorted((ROOT / package).rglob("*.py")):
            parts = path.relative_to(ROOT).with_suffix("").parts
            is_package = parts[-1] == "__init__"
            out[".".join(parts[:-1] if is_package else parts)] = (path, is_package)
    return out


@pytest.fixture(scope="module")
def modules() -> Modules:
    return {
        name: imports_of(path.read_text(encoding="utf-8"), name, is_package)
        for name, (path, is_package) in checkout().items()
    }


def within(name: str, package: str) -> bool:
    return name == package or name.startswith(package + ".")


def home_of(target: str) -> str:
    """Where ``ringkv.Name`` really comes from: a lazily exported name counts as an import of its module."""
    package, _, name = target.rpartition(".")
    if package == "ringkv" and name in ringkv.__all__:
        return f"{getattr(ringkv, name).__module__}.{name}"
    return target


# -- rules: each yields one line per violation ---------------------------------------------------------------


def strategies_that_import_one_another(modules: Modules) -> Iterator[str]:
    for name, imports in modules.items():
        for own in (package for package in STRATEGIES if within(name, package)):
            for other in (package for package in STRATEGIES if package != own):
                yield from (f"{name} imports {i.target}" for i in imports if within(home_of(i.target), other))


def library_modules_that_import_the_model_or_scripts(modules: Modules) -> Iterator[str]:
    for name in (name for name in modules if within(name, "ringkv")):
        for other in ("model", "scripts"):
            yield from (f"{name} imports {i.target}" for i in modules[name] if within(i.target, other))


def model_modules_that_know_a_concrete_cache(modules: Modules) -> Iterator[str]:
    for name in (name for name in modules if within(name, "model")):
        for other in (*STRATEGIES, "scripts"):
            yield from (f"{name} imports {i.target}" for i in modules[name] if within(home_of(i.target), other))


def light_modules_that_import_torch(modules: Modules) -> Iterator[str]:
    """Directly or through another module of ours, at import time."""
    for name in (name for name in NO_TORCH if name in modules):
        reached, queue = {name}, [name]
        while queue:
            for i in modules[queue.pop()]:
                if i.top_level and not i.typing_only:
                    if within(i.target, "torch"):
                        yield f"importing {name} imports torch"
                    for target in module_targets(i.target, modules):
                        if target not in reached:
                            reached.add(target)
                            queue.append(target)


def modules_other_than_scripts_that_import_hydra(modules: Modules) -> Iterator[str]:
    for name in (name for name in modules if not within(name, "scripts")):
        for other in ("hydra", "omegaconf"):
            yield from (f"{name} imports {i.target}" for i in modules[name] if within(i.target, other))


def library_modules_that_need_more_than_they_may(modules: Modules) -> Iterator[str]:
    """torch and safetensors; peers what they wrap; the harness numpy, psutil, rich, and extras where it uses them."""
    for name in (name for name in modules if within(name, "ringkv")):
        harness = within(name, "ringkv.harness")
        for i in modules[name]:
            root = i.target.partition(".")[0]
            needs = HARNESS_NEEDS if harness else PEERS_NEED if within(name, "ringkv.peers") else LIBRARY_NEEDS
            if root in sys.stdlib_module_names or root in needs:
                continue
            if not (harness and root in WHERE_USED and (not i.top_level or i.typing_only)):
                yield f"{name} imports {i.target}{' at module level' if i.top_level else ''}"


def module_targets(target: str, modules: Modules) -> list[str]:
    """Modules of ours that importing ``target`` runs, itself first; parents of a running module run anyway."""
    package, _, _ = target.rpartition(".")
    return [name for name in (target, package) if name in modules][:1]


def import_cycles(modules: Modules) -> Iterator[str]:
    edges = {
        name: {
            target
            for i in imports
            if i.top_level and not i.typing_only
            for target in module_targets(i.target, modules)
            if target != name
        }
        for name, imports in modules.items()
    }
    done: set[str] = set()

    def walk(name: str, trail: list[str]) -> Iterator[str]:
        if name in trail:
            yield " -> ".join([*trail[trail.index(name) :], name])
        elif name not in done:
            for target in sorted(edges[name]):
                yield from walk(target, [*trail, name])
            done.add(name)

    for name in edges:
        yield from walk(name, [])


RULES: dict[Callable[[Modules], Iterator[str]], dict[str, str]] = {
    strategies_that_import_one_another: {
        "ringkv.paged.manager": "def f():\n    from ringkv.ring.cache import LayerRingCache"
    },
    library_modules_that_import_the_model_or_scripts: {"ringkv.runner": "def f():\n    import model.sampler"},
    model_modules_that_know_a_concrete_cache: {"model.attention": "from ringkv import RingKVManager"},
    light_modules_that_import_torch: {
        "ringkv.horizon": "from ringkv.other import x",
        "ringkv.other": "try:\n    import torch.nn\nexcept ImportError:\n    pass",
    },
    modules_other_than_scripts_that_import_hydra: {"model.config": "def f():\n    from omegaconf import OmegaConf"},
    library_modules_that_need_more_than_they_may: {"ringkv.harness.video": "class A:\n    import av"},
    import_cycles: {
        "ringkv.a": "from ringkv.b import x",
        "ringkv.b": "if True:\n    from . import c",
        "ringkv.c": "import ringkv.a",
    },
}


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_there_are_no(rule: Callable[[Modules], Iterator[str]], modules: Modules) -> None:
    assert len(modules) > 10
    assert list(rule(modules)) == []


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_a_planted_module_breaks_the_rule(rule: Callable[[Modules], Iterator[str]]) -> None:
    planted = {name: imports_of(source, name, False) for name, source in RULES[rule].items()}
    assert len(list(rule(planted))) == 1


@pytest.mark.parametrize(
    ("name", "source"),
    [
        ("ringkv.config", "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import torch"),
        ("ringkv.config", "def f():\n    import torch"),
        ("ringkv.ring.cache", "from ringkv.horizon import slot_of\nfrom . import ops"),
        ("model.attention", "from ringkv import visible_frames\nfrom ringkv.resource import AttentionResource"),
        ("ringkv.harness.video", "import numpy as np\ndef f():\n    import av"),
        ("scripts.rollout", "import hydra\nimport ringkv.ring.manager\nimport model.sampler"),
    ],
)
def test_what_is_allowed_breaks_no_rule(name: str, source: str) -> None:
    modules = {name: imports_of(source, name, False)}
    assert [line for rule in RULES for line in rule(modules)] == []


def test_strategies_are_read_where_they_are(modules: Modules) -> None:
    """The rules would pass on an empty walk."""
    assert "ringkv.ring.manager" in modules
    targets = {i.target for i in modules["ringkv.ring.manager"]}
    assert any(within(target, "ringkv.config") for target in targets)
    assert any(within(target, "torch") for target in targets)


def test_nobody_edits_the_module_search_path() -> None:
    for path, _ in checkout().values():
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            assert not (isinstance(node, ast.Attribute) and ast.unparse(node) == "sys.path"), path


PROBE = """
import sys
import ringkv, ringkv.config, ringkv.step, ringkv.horizon, ringkv.memory
spec = ringkv.KVSpec(resource_key="kv", config=ringkv.RingKVConfig(
    num_layers=1, num_kv_heads=1, head_dim=2, num_qo_heads=1, tokens_per_frame=2, num_sessions=1,
    layers=(ringkv.RingKVLayerConfig(ring_frames=3, ring_buckets=3),)))
ringkv.visible_frames(spec.config.layers[0], 9)
ringkv.memory.session_bytes(spec.config, "bfloat16")
print("torch" in sys.modules, any(name.startswith("ringkv.ring") for name in sys.modules))
spec.resource_class.build(spec, ringkv.EngineResourceInfo(device="cpu", kv_dtype=__import__("torch").float32))
others = ("paged", "full", "shift", "harness")
others = (*("ringkv." + name for name in others), "model", "scripts", "flashinfer", "hydra", "wandb")
print(sorted(name for name in sys.modules if name.startswith(others)))
unresolved = [name for name in ringkv.__all__ if getattr(ringkv, name) is None]
print(unresolved, sorted(set(ringkv.__all__) - set(dir(ringkv))))
try:
    ringkv.no_such_name
except AttributeError as error:
    print(error)
"""


def test_planning_loads_no_torch_and_a_ring_loads_no_other_strategy() -> None:
    """The one subprocess of this file: what a fresh interpreter has loaded can only be asked in one."""
    done = subprocess.run([sys.executable, "-c", PROBE], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    light, others, names, missing = done.stdout.splitlines()
    assert light == "False False"
    assert others == "[]"
    assert names == "[] []"
    assert "no_such_name" in missing
