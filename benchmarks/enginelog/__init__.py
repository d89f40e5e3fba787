"""How fast engines' logs are read, and in how much memory."""
