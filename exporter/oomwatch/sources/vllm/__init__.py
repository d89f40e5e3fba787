"""What a vLLM engine says of itself: its /metrics page, its version and its health."""
