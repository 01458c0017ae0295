"""Faster ways to run the same step; README.md here says how and why.

Nothing is imported from here: engines name the file that they need, and a file imports torch's
compiler, Triton or our kernels only when it first uses them.
"""
