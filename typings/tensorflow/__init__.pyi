# TensorFlow ships no types, and the stubs that come with pyright lack many of its names: to pyright, it is Any.
from typing import Any

def __getattr__(name: str) -> Any: ...
