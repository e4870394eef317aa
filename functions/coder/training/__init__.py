"""How the demo model `coder` is made: its corpus, its recipe, one run of it, and what is published."""
