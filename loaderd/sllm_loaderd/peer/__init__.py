"""Serves this node's models to the loaders of other nodes: by HTTP ranges, to whoever has the token."""
