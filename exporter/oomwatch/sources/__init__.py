"""Where observations come from: one module per source. A source knows nothing of what is concluded from it."""
