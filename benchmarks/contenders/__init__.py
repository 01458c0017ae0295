"""Contenders: simulators that do the same work, each in a process of its own (`contest.py`).

A module has one function, `run(entry, pace)`: make ready, say so, then do `entry.rounds` rounds and
call `pace` after each.
"""
