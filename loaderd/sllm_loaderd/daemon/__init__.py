"""The loader daemon of one node."""
