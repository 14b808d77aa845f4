"""Small breaks of the code, at least two for each law, and the test that must notice each.

`python -m tests.mutate` applies them.
"""

from __future__ import annotations

from tests.breaks.keeping import KEEPING
from tests.breaks.mutation import Mutation
from tests.breaks.training import TRAINING

MUTATIONS: tuple[Mutation, ...] = (*TRAINING, *KEEPING)
