"""The language everyone speaks: messages, subjects, states, errors. No I/O, no torch."""
