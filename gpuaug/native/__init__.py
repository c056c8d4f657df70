"""C++ that is compiled once per machine, and the memory it works in."""
