"""What the probe costs the engine that it sits in."""
