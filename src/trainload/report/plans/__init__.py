"""The page of a plan: ranks, memory, timeline and candidates."""
