"""HTTP in, SSE out: the door through which functions are called."""
