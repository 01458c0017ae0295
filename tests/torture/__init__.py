"""Runs that are killed, crowded, starved of disk and read by threads must end in the same bits.

`make torture` does it for some minutes and writes benchmarks/results/torture.json.
"""
