"""``oomwatch diagnose``: a post-mortem from a log, a recording, or what the daemon observed."""
