"""A whole training run: the loop around a compiled training step, its files and what it tells."""

from __future__ import annotations
