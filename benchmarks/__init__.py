"""Benchmarks: each is ``python -m benchmarks.<name>``; see ``benchmarks/README.md`` for the method."""
