"""Generation behind one seam: ``base.Engine`` is what an engine is, ``loop.EngineLoop`` runs one on its own thread."""
