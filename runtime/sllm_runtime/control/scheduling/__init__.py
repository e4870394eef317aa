"""Where instances go: what a start would cost on each node, and the policies that choose by it. Pure."""
