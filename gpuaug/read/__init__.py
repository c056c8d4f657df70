"""The order of an epoch, and workers that read encoded bytes in this order."""
