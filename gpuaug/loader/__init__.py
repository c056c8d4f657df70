"""The loader: all stages in order, a few batches ahead; epochs, ranks, faults and state."""
