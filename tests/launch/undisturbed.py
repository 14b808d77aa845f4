"""Length of the reference run for interrupted and killed ones, long enough to interrupt it."""

STEPS = 200
CHECKPOINT_EVERY = 5
