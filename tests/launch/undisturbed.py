"""How long the run is that interrupted and killed ones must equal: so long that there is always
time for it.
"""

STEPS = 200
CHECKPOINT_EVERY = 5
