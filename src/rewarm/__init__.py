"""Rewarm gives a model server back, fast and verified, what it already computed or loaded once."""

__version__ = "0.1.0.dev0"
