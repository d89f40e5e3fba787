"""What an engine's log says of its memory: lines in, events with numbers out. Nothing else of the text leaves."""
