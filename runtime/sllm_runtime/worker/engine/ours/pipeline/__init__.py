"""Our engine over several processes, each with a run of layers and the KV of those layers (λScale, section 4).

``stage`` is a process behind the head, ``head`` the runner that an engine drives all of it by.
"""
