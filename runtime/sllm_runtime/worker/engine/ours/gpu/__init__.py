"""The engine's arithmetic on an accelerator: one interface (``ops``), exact and fast behind it."""
