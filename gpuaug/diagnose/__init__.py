"""What shows where time, memory and pixels go: the working parts of profile, plan, parity and doctor."""
