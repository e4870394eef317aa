"""What a CPU computes of a model, compiled: ``attention``, ``rows`` and ``dots`` over vectors (``lanes``), ``products``
over tiles, made into an object file by ``build`` and brought into a process by ``loaded``."""
