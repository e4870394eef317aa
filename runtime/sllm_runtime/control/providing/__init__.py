"""Nodes that are had and given back as they are needed: how many there should be, and who makes them. Decisions are
pure."""
