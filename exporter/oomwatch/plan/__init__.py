"""The arithmetic before a start: whether an engine will fit, and how many tokens its KV cache will hold."""
