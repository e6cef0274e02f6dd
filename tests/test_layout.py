"""The house of docs/design.md, section 1: who may import whom, read from the source."""

import ast
from pathlib import Path

import pytest

import jdllm

HOUSE = Path(jdllm.__file__).parent
FILES = sorted(HOUSE.rglob("*.py"))
ROOMS = ["config", "data", "diffusion", "model", "kernels", "generation", "training", "evaluation", "cli"]
"""From left to right; `data` stands next to config and knows nothing else."""


def imports(path):
    """Dotted names of all modules that a file imports, inside functions too."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def room(dotted):
    """The room of jdllm.<room>.…; None for the package itself."""
    name = dotted.split(".")[1] if "." in dotted else None
    return name if name in ROOMS else None


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(HOUSE)))
def test_nothing_in_jdllm_imports_torch_or_experiments(path):
    """cli.py alone starts what lives in weights_port, when a command asks for it."""
    forbidden = {"torch", "transformers", "experiments", "tests"} | (
        set() if path.name == "cli.py" else {"weights_port"}
    )
    assert not forbidden & {name.split(".")[0] for name in imports(path)}


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(HOUSE)))
def test_a_room_imports_only_from_rooms_to_its_left(path):
    own = path.relative_to(HOUSE).parts[0].removesuffix(".py")
    if own == "__init__":
        return  # public names, loaded on first use
    seen = {room(name) for name in imports(path) if name.split(".")[0] == "jdllm"} - {None}
    allowed = {"config", "data"} if own == "data" else set(ROOMS[: ROOMS.index(own) + 1])
    assert seen <= allowed, f"{path} imports from {sorted(seen - allowed)}"


def test_every_file_is_in_a_room():
    found = {path.relative_to(HOUSE).parts[0].removesuffix(".py") for path in FILES}
    assert found - {"__init__"} <= set(ROOMS)


def test_only_weights_port_imports_torch():
    for path in sorted((HOUSE.parent / "experiments").glob("*.py")):
        assert "torch" not in {name.split(".")[0] for name in imports(path)}, path
