"""Calls of functions by a model: how they are written, and read."""
