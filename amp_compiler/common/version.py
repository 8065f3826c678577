"""The version of the package, where every module can read it. ``pyproject.toml`` says the same."""

__version__ = "0.1.0"
