"""What every test here leans on: a seeded generator, a witness of every tensor made, hypothesis without deadlines."""

import pytest
import torch
from hypothesis import settings
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

# Derandomised, so that a failure seen once is seen again; without a deadline, since the first call of torch is slow.
settings.register_profile("ndpos", deadline=None, derandomize=True, database=None, max_examples=40)
settings.load_profile("ndpos")


def pytest_collection_modifyitems(items):
    if torch.cuda.is_available():
        return
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


@pytest.fixture
def rng():
    return torch.Generator().manual_seed(0)


@pytest.fixture(scope="module")
def digits():
    """The demo's digits, few of them held out."""
    data = pytest.importorskip("vision_demo.data", reason="needs the demo's optional packages")
    seen, held_out = data.load()
    return seen, held_out.first(12)


@pytest.fixture
def few(digits, monkeypatch):
    """Fewer digits to measure, for speed."""
    monkeypatch.setattr("vision_demo.data.load", lambda: digits)


class Witness(TorchDispatchMode):
    """Sees what every operation of torch returns while it is entered: `(name, tensor)` in order."""

    def __init__(self):
        super().__init__()
        self.made = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__
        self.made += [(name, leaf) for leaf in tree_leaves(out) if isinstance(leaf, torch.Tensor)]
        return out

    @property
    def dtypes(self):
        return {tensor.dtype for _, tensor in self.made}

    def elements(self, *names):
        """Elements that the operations of these names returned, all calls together."""
        return sum(tensor.numel() for name, tensor in self.made if name in names)


@pytest.fixture
def witness():
    return Witness()
