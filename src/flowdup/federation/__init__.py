"""A federation across machines: the engine that runs over NVIDIA FLARE, and its commands' work.

The only room that imports `nvflare` (extra `federation`).  FLARE carries messages between machines
with mutual TLS and keeps one process per node and job; what is in the messages, which rounds are
done, who takes part and what is refused is decided and recorded here.
"""
