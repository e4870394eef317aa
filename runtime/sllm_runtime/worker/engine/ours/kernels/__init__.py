"""What treats each row by itself on a CPU, compiled: ``attention`` and ``rows`` over vectors (``lanes``), made into an
object file by ``build`` and brought into a process by ``loaded``."""
