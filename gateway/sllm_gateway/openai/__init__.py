"""OpenAI's routes: what may be asked, and how the answer looks."""
