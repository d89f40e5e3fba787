"""How well the detectors tell faults from healthy engines: a simulated world with labels, baselines and scores."""
