"""One module per killer, and the statistics that they share. A detector does no I/O and reads no clock."""
