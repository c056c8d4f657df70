"""The loader: all stages in order, epochs, ranks, faults and state."""
