"""The house: a room leans only on rooms above it, the front door stays light, and every public name is documented."""

import ast
import importlib.util
import inspect
import re
import subprocess
import sys
from pathlib import Path

import pytest

import ndpos

HOUSE = Path(ndpos.__file__).parent
README = HOUSE.parent / "README.md"
ROOMS = (
    "sizes positions patches subspaces frequencies patterns radians kernels fitting picking rotation resample "
    "parameters encode segments presets convert inspect checkpoint timm draw __main__"
).split()
OUTSIDE = {"torch", "einops", *sys.stdlib_module_names}
GUESTS = {"timm": {"timm"}, "kernels": {"triton"}, "draw": {"matplotlib"}}  # the only rooms that others may enter


def imported(tree, package):
    """Dotted names of every module that a file imports, wherever in it the import stands."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            above = package[: len(package) - node.level + 1] if node.level else []
            base = ".".join([*above, *(node.module or "").split(".")]).strip(".")
            yield base
            if base in ("ndpos", "ndpos.encode"):  # what these give may be rooms
                yield from (f"{base}.{alias.name}" for alias in node.names)


def wrong_imports(house):
    """Every import of `house` that the order of the rooms forbids, as "file imports module"."""
    wrong = []
    for path in sorted(house.rglob("*.py")):
        place = path.relative_to(house).with_suffix("").parts
        room = place[0]
        if room == "__init__":
            continue
        if room not in ROOMS:
            wrong.append(f"{path.relative_to(house)} has no place in the order of the rooms")
            continue
        for name in imported(ast.parse(path.read_text()), ["ndpos", *place[:-1]]):
            top, *inside = name.split(".")
            if top != "ndpos":
                fits = top in OUTSIDE | GUESTS.get(room, set())
            elif not inside or inside[0] not in ROOMS:
                fits = False  # the front door itself
            elif inside[0] != room:
                fits = ROOMS.index(inside[0]) < ROOMS.index(room)
            else:
                fits = room != "encode" or inside[1:2] == [place[-1]]
            if not fits and name != "ndpos.encode":
                wrong.append(f"{path.relative_to(house)} imports {name}")
    return wrong


def test_a_room_imports_only_rooms_above_it_and_siblings_never_meet():
    assert (HOUSE / "encode" / "sinusoidal.py").exists()
    assert wrong_imports(HOUSE) == []


def test_the_check_of_imports_sees_every_kind_of_wrong_one(tmp_path):
    (tmp_path / "encode").mkdir()
    (tmp_path / "kernels").mkdir()
    planted = {
        "__init__.py": "from ndpos.timm import add_rope",
        "positions.py": "import math\nfrom ndpos.sizes import whole\nfrom ndpos.radians import angles",
        "radians.py": "def late():\n    from .subspaces import split\n    from .encode import rotary",
        "kernels/eager.py": "import torch, numpy\nfrom ndpos.kernels import triton",
        "encode/rotary.py": "from ..radians import angles\nfrom ndpos.encode.sinusoidal import add",
        "encode/bias.py": "from . import rotary\nimport ndpos.encode.rotary as turned",
        "convert.py": "import ndpos\nfrom ndpos import grid\nfrom ndpos.encode.rotary import rotate",
        "timm.py": "import timm\nfrom timm.layers import Attention",
        "resample.py": "import timm",
        "utils.py": "import torch",
    }
    for name, text in planted.items():
        (tmp_path / name).write_text(text)
    assert wrong_imports(tmp_path) == [
        "convert.py imports ndpos",
        "convert.py imports ndpos",
        "convert.py imports ndpos.grid",
        "encode/bias.py imports ndpos.encode.rotary",
        "encode/bias.py imports ndpos.encode.rotary",
        "encode/rotary.py imports ndpos.encode.sinusoidal",
        "kernels/eager.py imports numpy",
        "positions.py imports ndpos.radians",
        "radians.py imports ndpos.encode.rotary",
        "resample.py imports timm",
        "utils.py has no place in the order of the rooms",
    ]


def test_the_front_door_loads_neither_timm_nor_anything_that_draws():
    heavy = "('timm', 'torchvision', 'matplotlib', 'PIL', 'transformers')"
    seen = f"print([name for name in {heavy} if name in sys.modules])"
    # The twin: what is loaded is seen, by the one room that loads it or, without timm, by a stand-in.
    stand_in = "import types; sys.modules['timm'] = types.ModuleType('timm')"
    twin = "import ndpos.timm" if importlib.util.find_spec("timm") else stand_in
    run = subprocess.run(
        [sys.executable, "-c", f"import sys; import ndpos; {seen}; {twin}; {seen}"],
        capture_output=True,
        text=True,
        check=True,
        cwd=HOUSE.parent,
    )
    light, with_twin = map(ast.literal_eval, run.stdout.splitlines())
    assert light == []
    assert "timm" in with_twin


def test_no_room_is_named_like_a_function_of_the_front_door():
    rooms = {path.stem for path in HOUSE.rglob("*") if path.suffix == ".py" or path.is_dir()}
    assert "positions" in rooms
    assert "rotate" in ndpos.__all__
    assert not rooms & set(ndpos.__all__)
    assert not any(inspect.ismodule(getattr(ndpos, name)) for name in ndpos.__all__)


def missing_sections(thing):
    text = inspect.getdoc(thing) or ""
    sections = set(re.findall(r"^(Args|Attributes|Returns|Raises|Example|Source):$", text, re.MULTILINE))
    needed = {"Raises", "Example", "Source"}
    if inspect.isclass(thing):
        sections |= {"Args"} if "Attributes" in sections else set()
    else:
        needed |= {"Returns"}
    missing = (needed | {"Args"}) - sections
    return missing | ({"an example that runs"} if ">>> " not in text else set())


@pytest.mark.parametrize("name", ndpos.__all__)
def test_every_public_name_says_what_it_takes_gives_and_refuses_and_where_it_is_from(name):
    assert not missing_sections(getattr(ndpos, name))


def test_the_check_of_sections_misses_what_is_missing():
    def bare(x):
        """Nothing of use.

        Args:
            x: Anything.
        """

    assert missing_sections(bare) == {"Returns", "Raises", "Example", "Source", "an example that runs"}


def test_every_public_name_of_the_front_door_is_one_of_its_rooms():
    assert len(set(ndpos.__all__)) == len(ndpos.__all__)
    for name in ndpos.__all__:
        home = sys.modules[getattr(ndpos, name).__module__]
        assert name in home.__all__


def python_blocks(text):
    """Each ```python block: the line it starts on, its code, and the packages that a comment before it names."""
    blocks = r"^(?:<!-- needs ([^\n]*) -->\n)?```python[^\n]*\n(.*?)^```"
    for match in re.finditer(blocks, text, re.MULTILINE | re.DOTALL):
        yield text[: match.start(2)].count("\n"), match.group(2), (match.group(1) or "").replace(",", " ").split()


def run_block(line, block):
    """The names that a block leaves; padded, so that a traceback names the line of the README."""
    names = {"__name__": "__main__"}
    exec(compile("\n" * line + block, str(README), "exec"), names)
    return names


def test_every_block_of_the_readme_runs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    blocks = [(line, block) for line, block, needs in python_blocks(README.read_text()) if not needs]
    assert blocks
    for line, block in blocks:
        run_block(line, block)


def test_blocks_of_a_readme_are_found_with_their_lines():
    text = "# Title\n\n```python\nx = 1\ny = x\n```\n```bash\nls\n```\n"
    text += "<!-- needs a, b -->\n```python\nraise ValueError\n```\n"
    assert list(python_blocks(text)) == [(3, "x = 1\ny = x\n", []), (11, "raise ValueError\n", ["a", "b"])]
