"""The control plane: what exists, what should run where, and the commands that make it so. Decisions are pure."""
