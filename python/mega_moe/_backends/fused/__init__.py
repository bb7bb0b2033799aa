"""The fused backend: one kernel for each direction, on memory that the ranks share."""
