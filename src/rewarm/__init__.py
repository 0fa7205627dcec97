"""Rewarm gives a model server back, fast and verified, what it already computed once."""

__version__ = "0.1.0.dev0"
