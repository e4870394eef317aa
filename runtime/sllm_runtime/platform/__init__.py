"""What every daemon stands on: settings, bus, state, processes, telemetry. Imports `protocol` only; no torch."""
